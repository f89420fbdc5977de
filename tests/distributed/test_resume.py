"""Stopping and starting again changes nothing: weights, losses, rates and rows, on any ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.helpers import run_distributed
from tests.tiny import register_tiny, tiny_config
from torchtitan_lc.trainer import Trainer

SETTINGS: dict[str, Any] = {
    "training.global_batch_size": 4,
    "training.max_norm": 1.0,
    "optimizer.name": "AdamW",
    "optimizer.lr": 1e-2,
    "optimizer.weight_decay": 0.1,
    "lr_scheduler.warmup_steps": 2,
    "lr_scheduler.total_steps": 6,
    "lr_scheduler.decay_type": "cosine",
    "lr_scheduler.min_lr_factor": 0.1,
    "metrics.log_freq": 1,
    "checkpoint.enable": True,
    "checkpoint.interval": 2,
}


def _train(
    rank: int, world_size: int, folder: str, steps: int, settings: dict[str, Any]
) -> dict[str, Any]:
    register_tiny()
    chosen = {**SETTINGS, "job.dump_folder": folder, "training.steps": steps, **settings}
    trainer = Trainer(tiny_config(chosen), torch.device("cpu"))
    labels: list[Tensor] = []
    next_batch = trainer.loader.next_batch

    def watched(lanes: Any) -> Any:
        batch = next_batch(lanes)
        labels.append(batch["labels"].clone())
        return batch

    trainer.loader.next_batch = watched  # type: ignore[method-assign]
    try:
        trainer.train()
    finally:
        trainer.close()
    weights = {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for n, p in trainer.module.named_parameters()
    }
    return {
        "weights": weights,
        "labels": labels,
        "tokens": trainer.state.n_tokens_seen,
        "step": trainer.state.step,
    }


def _logged(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _run(world_size: int, folder: Path, steps: int, **settings: Any) -> list[dict[str, Any]]:
    flat = {key.replace("__", "."): value for key, value in settings.items()}
    return run_distributed(_train, world_size, str(folder), steps, flat, timeout=120)


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_six_steps_are_three_and_three_bit_for_bit(tmp_path: Path, async_mode: str) -> None:
    settings = {
        "parallelism__context_parallel_degree": 2,
        "checkpoint__async_mode": async_mode,
    }
    whole = _run(2, tmp_path / "whole", 6, **settings)
    _run(2, tmp_path / "parts", 3, **settings)
    parts = _run(2, tmp_path / "parts", 6, **settings)
    for a, b in zip(whole, parts, strict=True):
        assert all(torch.equal(a["weights"][n], b["weights"][n]) for n in a["weights"])
        assert a["tokens"] == b["tokens"] == 6 * 4 * 64
    logged, resumed = _logged(tmp_path / "whole"), _logged(tmp_path / "parts")
    assert [line["step"] for line in resumed] == [1, 2, 3, 4, 5, 6]
    for key in ("loss", "grad_norm", "lr", "n_tokens_seen"):
        assert [line[key] for line in logged] == [line[key] for line in resumed], key
    assert len({line["lr"] for line in logged}) > 3, "the schedule must move for this to mean much"


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {}),
        (2, {"parallelism__context_parallel_degree": 2}),
        (2, {"parallelism__data_parallel_replicate_degree": 2}),
        (4, {"parallelism__context_parallel_degree": 2, "attention__strategy": "ulysses"}),
        (4, {}),
    ],
)
def test_resuming_on_other_ranks_reads_the_same_rows_and_gives_the_same_weights(
    world_size: int, settings: dict[str, Any], tmp_path: Path, saved_at_two: Path, whole: Any
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved_at_two, folder)
    resumed = _run(world_size, folder, 6, **settings)
    for name, want in whole[0]["weights"].items():
        # Sums in another order, through AdamW, which divides by the root of small squares: 1e-5 of
        # the weights' size is a few times the rounding that six steps collect.
        error = (resumed[0]["weights"][name] - want).norm() / want.norm()
        assert error < 1e-5, (name, error.item())
    cp = settings.get("parallelism__context_parallel_degree", 1)
    rows = {tuple(row.tolist()) for r in resumed[::cp] for batch in r["labels"] for row in batch}
    # whole ran on two ranks: its last three steps are the second half of each rank's batches.
    halves = [r["labels"][len(r["labels"]) // 2 :] for r in whole]
    want_rows = {tuple(row.tolist()) for half in halves for batch in half for row in batch}
    assert rows == want_rows and len(rows) == 3 * 4, "each row once, none repeated, none skipped"


@pytest.fixture(scope="module")
def saved_at_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps on two data-parallel ranks."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    _run(2, folder, 3)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Six unbroken steps on two data-parallel ranks."""
    return _run(2, tmp_path_factory.mktemp("whole") / "run", 6)


def test_the_rate_that_is_logged_is_the_one_that_was_used_also_without_the_old_schedule(
    tmp_path: Path,
) -> None:
    _run(1, tmp_path, 4)
    _run(1, tmp_path, 6, checkpoint__exclude_from_loading=["lr_scheduler"])
    first, resumed = _logged(tmp_path)[:2], _logged(tmp_path)[4:]
    assert [line["step"] for line in resumed] == [5, 6]
    assert [line["lr"] for line in resumed] == [line["lr"] for line in first]  # it starts anew


def test_a_complete_job_says_so_and_trains_nothing(tmp_path: Path) -> None:
    first = _run(1, tmp_path, 2)
    again = _run(1, tmp_path, 2)
    assert again[0]["labels"] == [] and again[0]["step"] == 2
    assert all(
        torch.equal(first[0]["weights"][n], again[0]["weights"][n]) for n in first[0]["weights"]
    )
    assert len(_logged(tmp_path)) == 2
