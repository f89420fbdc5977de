"""Checkpoints across world sizes: what 2 processes save, 1, 2 and 4 processes load, bit for bit."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from tests.helpers import run_distributed
from tests.small_run import SmallRun, differing
from torchtitan_lc.components.agreement import all_or_none, from_rank_zero
from torchtitan_lc.config.job_config import Checkpoint
from torchtitan_lc.tools.errors import UserError

# Drawn per rank, so not the same at another world size.
PER_RANK = ("next random number", "lanes")


def config(**changes: Any) -> Checkpoint:
    settings: dict[str, Any] = {"enable": True, "interval": 3, "keep_latest_k": 0}
    return Checkpoint(**(settings | changes))


def save_at_step_3(rank: int, world_size: int, folder: str, dp_size: int | None) -> dict[str, Any]:
    return SmallRun(folder, config(), dp_size=dp_size).train_to(3).whole()


def load(rank: int, world_size: int, folder: str, dp_size: int | None) -> dict[str, Any]:
    small = SmallRun(folder, config(load_only=True), seed=50, dp_size=dp_size)
    fresh_random = small.whole()["next random number"]
    assert small.manager.load() == 3
    return small.whole() | {"fresh random number": fresh_random}


def saved_and_loaded(
    tmp_path: Path, save_at: int, load_at: int, dp_save: int | None = None, dp: int | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    saved = run_distributed(save_at_step_3, save_at, str(tmp_path), dp_save)
    return saved, run_distributed(load, load_at, str(tmp_path), dp)


def lanes_of(wholes: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: lane for whole in wholes for name, lane in whole["lanes"].items()}


@pytest.mark.parametrize(("save_at", "load_at"), [(2, 2), (2, 4), (2, 1), (4, 2)])
def test_weights_moments_rate_and_lanes_are_bit_equal_at_another_world_size(
    tmp_path: Path, save_at: int, load_at: int
) -> None:
    saved, loaded = saved_and_loaded(tmp_path, save_at, load_at)
    for whole in loaded:
        assert differing(saved[0], whole, without=(*PER_RANK, "fresh random number")) == []
    # Each of the 4 lanes is held by exactly one rank, and stands where it stood.
    assert sum(len(whole["lanes"]) for whole in loaded) == 4
    assert lanes_of(loaded) == lanes_of(saved)
    rows_read = [lane["document"] for lane in lanes_of(saved).values()]
    assert len(set(rows_read)) == 4  # a lane in another's place would be noticed


def test_one_process_without_a_group_loads_what_two_saved(tmp_path: Path) -> None:
    saved = run_distributed(save_at_step_3, 2, str(tmp_path), None)
    assert not dist.is_initialized()
    loaded = load(0, 1, str(tmp_path), None)
    assert differing(saved[0], loaded, without=(*PER_RANK, "fresh random number")) == []
    assert lanes_of([loaded]) == lanes_of(saved)


def test_random_generators_return_to_their_rank_and_new_ranks_keep_their_seed(
    tmp_path: Path,
) -> None:
    saved, loaded = saved_and_loaded(tmp_path, 2, 4)
    numbers = [float(whole["next random number"]) for whole in loaded]
    assert numbers[:2] == [float(whole["next random number"]) for whole in saved]
    assert numbers[2:] == [float(whole["fresh random number"]) for whole in loaded[2:]]
    assert len(set(numbers)) == 4


@pytest.mark.parametrize(("dp_save", "dp"), [(2, 1), (1, 2), (1, 1)])
def test_ranks_that_share_rows_resume_at_the_same_place_and_others_at_their_own(
    tmp_path: Path, dp_save: int, dp: int
) -> None:
    saved, loaded = saved_and_loaded(tmp_path, 2, 2, dp_save, dp)
    assert lanes_of(loaded) == lanes_of(saved)
    assert (loaded[0]["lanes"] == loaded[1]["lanes"]) == (dp == 1)


def train_six(rank: int, world_size: int, folder: str, halves: bool) -> dict[str, Any]:
    if halves:
        SmallRun(folder, config()).train_to(3)
    small = SmallRun(folder, config(), seed=70 if halves else 0)
    small.manager.load()
    return small.train_to(6).whole()


def test_three_steps_and_a_resume_equal_six_steps_on_two_ranks(tmp_path: Path) -> None:
    unbroken = run_distributed(train_six, 2, str(tmp_path / "a"), False)
    resumed = run_distributed(train_six, 2, str(tmp_path / "b"), True)
    for a, b in zip(unbroken, resumed, strict=True):
        assert differing(a, b) == []


# ---- ranks agree -----------------------------------------------------------------------------


def error_of_load(rank: int, world_size: int, folder: str, changes: dict[str, Any]) -> str:
    small = SmallRun(folder, config(), **changes)
    with pytest.raises(UserError) as refused:
        small.manager.load()
    dist.barrier()  # nobody is stuck in a collective
    return str(refused.value)


def error_on_all(tmp_path: Path, **changes: Any) -> str:
    first, second = run_distributed(error_of_load, 2, str(tmp_path), changes)
    assert first == second
    return first


def test_another_models_checkpoint_is_the_same_error_on_every_rank_and_writes_nothing(
    tmp_path: Path,
) -> None:
    run_distributed(save_at_step_3, 2, str(tmp_path), None)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert "model.head.weight: shape [5, 6] in" in error_on_all(tmp_path, width=10)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_lanes_that_a_loader_refuses_are_the_same_error_on_every_rank(tmp_path: Path) -> None:
    run_distributed(save_at_step_3, 2, str(tmp_path), None)
    assert "4 lanes were saved, not 8" in error_on_all(tmp_path, num_lanes=8)


@pytest.mark.parametrize("shard", ["__0_0.distcp", "__1_0.distcp"])
def test_damaged_bytes_of_either_rank_are_the_same_error_on_every_rank(
    tmp_path: Path, shard: str
) -> None:
    run_distributed(save_at_step_3, 2, str(tmp_path), None)
    damaged = tmp_path / "checkpoint" / "step-3" / shard
    damaged.write_bytes(b"\0" * damaged.stat().st_size)
    assert "step-3 cannot be read" in error_on_all(tmp_path)


def load_with_another_view(rank: int, world_size: int, folder: str) -> int:
    """Rank 1 alone believes that the newest step is another one: its config says load_step."""
    small = SmallRun(folder, config(load_step=3 if rank == 1 else -1))
    return small.manager.load()


def test_rank_zero_decides_which_step_is_loaded(tmp_path: Path) -> None:
    run_distributed(train_six, 2, str(tmp_path), False)
    assert run_distributed(load_with_another_view, 2, str(tmp_path)) == [6, 6]


@pytest.mark.parametrize("missing", [".metadata", "__1_0.distcp"])
def test_an_incomplete_newest_step_sends_all_ranks_to_the_older_one(
    tmp_path: Path, missing: str
) -> None:
    run_distributed(train_six, 2, str(tmp_path), False)
    (tmp_path / "checkpoint" / "step-6" / missing).unlink()
    loaded = run_distributed(load, 2, str(tmp_path), None)
    assert [whole["train_state"]["step"] for whole in loaded] == [3, 3]


def agree(rank: int, world_size: int) -> list[str]:
    texts = []

    def refuse(error: Exception) -> None:
        assert rank == 0  # the others do not look
        raise error

    for error in (UserError("yours"), OSError("ours")):
        with pytest.raises((UserError, OSError, RuntimeError)) as refused:
            from_rank_zero(lambda error=error: refuse(error))  # type: ignore[misc]
        texts.append(f"{type(refused.value).__name__}: {refused.value}")
    with pytest.raises(UserError) as refused:
        all_or_none("rank 1's" if rank == 1 else None)
    texts.append(str(refused.value))
    all_or_none(None)
    texts.append(from_rank_zero(lambda: f"rank {rank} looked"))
    return texts


def test_what_rank_zero_finds_and_what_one_rank_refuses_reaches_all() -> None:
    zero, one = run_distributed(agree, 2)
    assert zero == ["UserError: yours", "OSError: ours", "rank 1's", "rank 0 looked"]
    assert one[1] == "RuntimeError: rank 0 failed: OSError('ours')"
    assert one[::2] == zero[::2] and one[3] == zero[3]


# ---- saving ----------------------------------------------------------------------------------


def train_async(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    """Each step is saved in the background while gloo collectives of the next steps go on."""
    small = SmallRun(folder, config(interval=1, async_mode="async", keep_latest_k=2))
    wholes = [small.train_to(step).whole() for step in range(1, 5)]
    small.manager.wait()
    return wholes


def load_step(rank: int, world_size: int, folder: str, step: int) -> dict[str, Any]:
    small = SmallRun(folder, config(load_step=step), seed=5)
    assert small.manager.load() == step
    return small.whole()


def test_async_saves_beside_training_hold_their_own_step_and_old_ones_go(tmp_path: Path) -> None:
    wholes = run_distributed(train_async, 2, str(tmp_path))
    assert sorted(p.name for p in (tmp_path / "checkpoint").iterdir()) == ["step-3", "step-4"]
    for step in (3, 4):
        loaded = run_distributed(load_step, 2, str(tmp_path), step)
        for rank in (0, 1):
            assert differing(wholes[rank][step - 1], loaded[rank]) == []


def train_until_the_disk_is_full(rank: int, world_size: int, folder: str, mode: str) -> str:
    small = SmallRun(folder, config(interval=1, keep_latest_k=2, async_mode=mode)).train_to(2)
    small.manager.wait()
    dist.barrier()

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(FileSystemWriter, "write_data", full)
        with pytest.raises(UserError) as refused:
            small.train_to(3)
            small.manager.wait()
    return str(refused.value)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_disk_full_on_one_rank_stops_all_and_leaves_the_older_checkpoints(
    tmp_path: Path, mode: str
) -> None:
    texts = run_distributed(train_until_the_disk_is_full, 2, str(tmp_path), mode)
    assert all("step-3 could not be written" in text for text in texts)
    assert all("No space left" in text for text in texts)
    loaded = run_distributed(load_newest, 2, str(tmp_path))
    assert loaded == [2, 2]
    assert (tmp_path / "checkpoint" / "step-1" / ".metadata").exists()


def load_newest(rank: int, world_size: int, folder: str) -> int:
    return SmallRun(folder, config()).manager.load()


def test_lane_speeds_differ_so_that_a_mixed_up_lane_would_show(tmp_path: Path) -> None:
    saved = run_distributed(save_at_step_3, 2, str(tmp_path), None)
    positions = [lane["document"] for lane in lanes_of(saved).values()]
    assert all(a != b for a, b in itertools.combinations(positions, 2))


def one_rank_fails_while_a_save_is_in_flight(rank: int, world_size: int, folder: str) -> None:
    small = SmallRun(folder, config(interval=1, async_mode="async")).train_to(1)
    if rank == 1:
        small.manager.close()
    dist.barrier()  # the other rank goes on with the training
    small.manager.close()


def test_a_rank_that_fails_alone_does_not_wait_for_the_others_to_end_its_save(
    tmp_path: Path,
) -> None:
    run_distributed(one_rank_fails_while_a_save_is_in_flight, 2, str(tmp_path), timeout=30)
