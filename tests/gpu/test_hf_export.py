"""Exports from GPUs: copied to host memory at once, gathered over gloo while NCCL trains on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.test_hf_weights import check_exports, train_and_export
from tests.helpers import run_distributed
from tests.hf_folders import make_folder

pytestmark = pytest.mark.gpu


def test_weights_come_into_gpu_shards_and_each_export_holds_its_own_step(tmp_path: Path) -> None:
    make_folder(tmp_path / "llama_tied", "llama_tied")
    ranks = min(2, torch.cuda.device_count())
    settings = {
        "checkpoint.hf_interval": 1,
        "checkpoint.export_dtype": "float32",
        "attention.kernel": "math",
    }
    weights = run_distributed(
        train_and_export,
        ranks,
        str(tmp_path),
        str(tmp_path / "out"),
        settings,
        "cuda",
        timeout=240,
        backend="cpu:gloo,cuda:nccl",
    )[0]
    assert len(weights) == 3
    check_exports(tmp_path / "out", weights)
