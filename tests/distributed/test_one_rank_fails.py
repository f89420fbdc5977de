"""What one rank alone cannot do stops all of them, with its words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.helpers import run_distributed
from tests.tiny import register_tiny, tiny_config
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.trainer import Trainer


def _train(rank: int, world_size: int, folder: str) -> tuple[str, int]:
    register_tiny()
    settings = {
        "job.dump_folder": folder,
        "training.dataset": "jsonl",
        "training.dataset_path": f"{folder}/data.jsonl",
    }
    trainer = Trainer(tiny_config(settings), torch.device("cpu"))
    with pytest.raises(UserError) as refused:
        trainer.train()
    trainer.close()
    return str(refused.value), trainer.state.step


def test_a_document_that_one_rank_cannot_read_is_named_by_all(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "long enough for a row of this job, and some more. " * 2})] * 8
    lines[5] = json.dumps({"txt": "of the second lane"})
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    (first, step), (second, other) = run_distributed(_train, 2, str(tmp_path))
    assert first == second and 'data.jsonl:6 is not a document: it has no field "text"' in first
    assert step == other > 0
