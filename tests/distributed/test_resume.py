"""Stopping and starting again changes nothing: weights, losses, rates and rows, on any ranks."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.helpers import run_distributed
from tests.small_run import SmallRun
from tests.tiny import register_tiny, tiny_config
from torchtitan_lc.components.checkpoint_folders import find_latest, inspect
from torchtitan_lc.config.job_config import Checkpoint
from torchtitan_lc.tools.errors import UserError
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


def test_a_job_that_ended_with_weights_alone_is_complete_until_its_steps_are_raised(
    tmp_path: Path,
) -> None:
    settings = {"checkpoint__last_save_model_only": True}
    _run(2, tmp_path, 4, **settings)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    again = _run(2, tmp_path, 4, **settings)
    assert [answer["labels"] for answer in again] == [[], []]
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == before
    raised = _run(1, tmp_path, 5, **settings)
    assert raised[0]["step"] == 5 and len(_logged(tmp_path)) == 5  # from step 2, with step 3 anew
    assert [line["step"] for line in _logged(tmp_path)] == [1, 2, 3, 4, 5]


def _save_with_no_room_on_rank_one(
    rank: int, world_size: int, folder: str, async_mode: Any
) -> list[str]:
    """What each rank is told of a save in which rank 1 may write 50,000 bytes to a file."""
    settings = Checkpoint(enable=True, interval=1, keep_latest_k=0, async_mode=async_mode)
    run = SmallRun(folder, settings, width=5000)
    run.train_to(1).manager.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    told = []
    try:
        run.train_to(2)
        run.manager.wait()
    except UserError as error:
        told.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return told


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_rank_that_cannot_write_its_shard_is_named_by_all_as_a_disk_without_room(
    tmp_path: Path, async_mode: str
) -> None:
    told = run_distributed(_save_with_no_room_on_rank_one, 2, str(tmp_path), async_mode)
    path = tmp_path / "checkpoint" / "step-2"
    for (text,) in told:
        assert f"checkpoint {path} could not be written: torch.save could not write all" in text
        assert "as on a full disk" in text and "bytes are free there" in text
        assert "Older checkpoints are untouched" in text
    assert find_latest(path.parent)[0] == inspect(path.with_name("step-1"), 1)
