"""The equality table over NCCL: what gloo blesses must be right on GPUs too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.test_training_equals_one_process import ROWS, SEQ, check, strategies
from tests.helpers import run_distributed
from tests.tiny import masked_rows, register_tiny

pytestmark = pytest.mark.gpu


def _table(rank: int, world_size: int, tmp: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    register_tiny()
    rows = masked_rows(ROWS, SEQ)
    base = {"training.global_batch_size": ROWS, "job.dump_folder": tmp, "attention.kernel": "math"}
    for flavor in ("gqa", "one_kv", "six", "tied"):
        for strategy in strategies(world_size)[:3]:
            for mode in ("none", "full", "selective"):
                settings = {
                    **base,
                    **strategy,
                    "model.flavor": flavor,
                    "activation_checkpoint.mode": mode,
                    "parallelism.context_parallel_degree": world_size,
                }
                check(settings, rows, device=f"cuda:{rank}")
    for degrees in ({}, {"parallelism.data_parallel_replicate_degree": world_size}):
        check({**base, **degrees, "model.flavor": "gqa"}, rows, device=f"cuda:{rank}")


def test_loss_and_every_gradient_equal_one_process_in_fp32(tmp_path: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_distributed(_table, 2, str(tmp_path), timeout=280, backend="cpu:gloo,cuda:nccl")
