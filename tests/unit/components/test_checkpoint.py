"""Saving and resuming in one process: what comes back, what is refused, what is left alone."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from tests.small_run import Lanes, SmallRun, TrainState, differing
from torchtitan_lc.components.checkpoint import CheckpointManager
from torchtitan_lc.components.checkpoint_reading import read_metadata, saved_shapes
from torchtitan_lc.components.lr_scheduler import build_lr_scheduler
from torchtitan_lc.components.optimizer import build_optimizer
from torchtitan_lc.config.job_config import Checkpoint, LRScheduler, Optimizer
from torchtitan_lc.tools.errors import UserError


def config(**changes: Any) -> Checkpoint:
    settings: dict[str, Any] = {"enable": True, "interval": 2, "keep_latest_k": 0}
    return Checkpoint(**(settings | changes))


def steps_in(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in (folder / "checkpoint").iterdir())


def fingerprint(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below with its size and time of writing: equal means untouched."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in files}


# ---- what comes back -------------------------------------------------------------------------


def test_three_steps_and_a_resume_equal_six_steps_bit_for_bit(tmp_path: Path) -> None:
    unbroken = SmallRun(tmp_path / "a", config(enable=False)).train_to(6)
    SmallRun(tmp_path / "b", config(interval=3)).train_to(3)
    resumed = SmallRun(tmp_path / "b", config(interval=3), seed=99)
    assert resumed.manager.load() == 3
    resumed.train_to(6)
    assert differing(unbroken.whole(), resumed.whole()) == []
    assert len(unbroken.whole()) > 15  # weights, moments, steps, lr, lanes, rng were compared


def test_nothing_is_loaded_from_an_empty_folder(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, config())
    before = run.whole()
    assert run.manager.load() == 0
    assert differing(before, run.whole()) == []


def test_a_disabled_checkpoint_neither_saves_nor_loads(tmp_path: Path) -> None:
    SmallRun(tmp_path, config()).train_to(2)
    before = fingerprint(tmp_path)
    run = SmallRun(tmp_path, config(enable=False), seed=5)
    assert run.manager.load() == 0
    assert not run.manager.save(4, last_step=True)
    assert fingerprint(tmp_path) == before


def test_python_and_numpy_generators_are_restored(tmp_path: Path) -> None:
    import random

    import numpy

    SmallRun(tmp_path, config()).train_to(2)
    expected = (random.random(), float(numpy.random.rand()))
    assert SmallRun(tmp_path, config()).manager.load() == 2
    assert (random.random(), float(numpy.random.rand())) == expected


def test_the_resuming_runs_learning_rate_and_weight_decay_count_not_the_saved_ones(
    tmp_path: Path,
) -> None:
    SmallRun(tmp_path, config(), optimizer=Optimizer(lr=0.05, weight_decay=0.1)).train_to(2)
    edited = SmallRun(tmp_path, config(), optimizer=Optimizer(lr=0.5, weight_decay=0.3))
    edited.manager.load()
    group = edited.optimizer.param_groups[0]
    assert group["lr"] == pytest.approx(0.5 * 3 / 4)  # update 3 of a warm-up of 4
    assert group["weight_decay"] == 0.3


def test_tied_weights_are_saved_and_stay_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight

    def run() -> tuple[Tied, CheckpointManager]:
        model = Tied()
        optimizer = build_optimizer(model.named_parameters(), Optimizer())
        manager = CheckpointManager(
            config(),
            tmp_path,
            model=model,
            optimizer=optimizer,
            lr_scheduler=build_lr_scheduler(optimizer, LRScheduler(), 10),
            train_state=TrainState(),
            dataloader=Lanes([0]),
            model_identity={"name": "tied"},
        )
        model.head(model.embedding(torch.arange(5))).sum().backward()
        optimizer.step()
        return model, manager

    saved, manager = run()
    manager.save(2)
    loaded, manager = run()
    assert not torch.equal(saved.head.weight, loaded.head.weight)
    manager.load()
    assert torch.equal(saved.head.weight, loaded.head.weight)
    assert loaded.head.weight is loaded.embedding.weight


# ---- when and what is saved ------------------------------------------------------------------


def test_every_interval_and_the_last_step_are_saved(tmp_path: Path) -> None:
    SmallRun(tmp_path, config(interval=2)).train_to(5, last_step=5)
    assert steps_in(tmp_path) == [2, 4, 5]


def test_the_first_step_is_saved_if_wanted(tmp_path: Path) -> None:
    SmallRun(tmp_path, config(interval=3, enable_first_step_checkpoint=True)).train_to(3)
    assert steps_in(tmp_path) == [1, 3]


def test_load_only_loads_and_never_writes(tmp_path: Path) -> None:
    SmallRun(tmp_path, config()).train_to(2)
    before = fingerprint(tmp_path)
    run = SmallRun(tmp_path, config(load_only=True))
    assert run.manager.load() == 2
    run.train_to(4, last_step=4)
    assert fingerprint(tmp_path) == before


@pytest.mark.parametrize("export_dtype", ["float32", "bfloat16"])
def test_a_model_only_last_save_holds_weights_in_the_wanted_dtype_and_nothing_else(
    tmp_path: Path, export_dtype: str
) -> None:
    settings = config(last_save_model_only=True, export_dtype=export_dtype)
    run = SmallRun(tmp_path, settings).train_to(3, last_step=3)
    saved = read_metadata(tmp_path / "checkpoint" / "step-3").state_dict_metadata
    weights = {f"model.{name}" for name, _ in run.model.named_parameters()}
    assert saved.keys() == weights | {"identity"}
    dtypes = {saved[key].properties.dtype for key in weights}  # type: ignore[union-attr]
    assert dtypes == {getattr(torch, export_dtype)}
    assert "train_state" in saved_shapes(tmp_path / "checkpoint" / "step-2")


def test_a_step_that_is_trained_again_replaces_its_folder_whole_and_that_was_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SmallRun(tmp_path, config()).train_to(4)
    stale = tmp_path / "checkpoint" / "step-4" / "__7_0.distcp"
    stale.write_bytes(b"a shard of a run with more ranks")
    run = SmallRun(tmp_path, config(load_step=2))
    assert run.manager.load(4) == 2
    assert f"{stale.parent} will be replaced when this run reaches" in caplog.text
    run.train_to(4)
    assert not stale.exists()
    again = SmallRun(tmp_path, config(), seed=7)
    assert again.manager.load() == 4
    assert differing(run.whole(), again.whole()) == []


# ---- async -----------------------------------------------------------------------------------


class SlowWriter:
    """Holds every write of a checkpoint until ``go`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.waiting = 0
        write_data = FileSystemWriter.write_data

        def held(writer: Any, *arguments: Any) -> Any:
            self.waiting += 1
            assert self.go.wait(timeout=30)
            return write_data(writer, *arguments)

        monkeypatch.setattr(FileSystemWriter, "write_data", held)


def test_an_async_save_holds_what_was_true_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SlowWriter(monkeypatch)
    run = SmallRun(tmp_path, config(interval=3, async_mode="async")).train_to(3)
    at_the_call = run.whole()
    for _ in range(2):  # weights, moments, lanes, counters and rng all move on
        run.train_one()
    assert not (tmp_path / "checkpoint" / "step-3" / ".metadata").exists()
    writer.go.set()
    run.manager.wait()
    loaded = SmallRun(tmp_path, config(), seed=9)
    assert loaded.manager.load() == 3
    assert differing(at_the_call, loaded.whole()) == []


def test_each_of_many_async_saves_holds_its_own_step(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, config(interval=1, async_mode="async"))
    wholes = [run.train_to(step).whole() for step in range(1, 7)]
    run.manager.wait()
    for step, whole in enumerate(wholes, start=1):
        loaded = SmallRun(tmp_path, config(load_step=step), seed=9)
        loaded.manager.load()
        assert differing(whole, loaded.whole()) == [], step


def test_one_async_save_is_in_flight_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SlowWriter(monkeypatch)
    run = SmallRun(tmp_path, config(interval=1, async_mode="async")).train_to(1)
    second = threading.Thread(target=lambda: run.train_to(2))
    second.start()
    second.join(timeout=0.3)
    assert second.is_alive() and steps_in(tmp_path) == [1]
    writer.go.set()
    second.join(timeout=30)
    run.manager.wait()
    assert steps_in(tmp_path) == [1, 2]


def test_the_last_step_is_on_disk_when_save_returns_even_in_async_mode(tmp_path: Path) -> None:
    SmallRun(tmp_path, config(interval=2, async_mode="async")).train_to(3, last_step=3)
    for step in (2, 3):
        assert (tmp_path / "checkpoint" / f"step-{step}" / ".metadata").exists()


def disk_full(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


def zip_writer_on_a_full_disk(*arguments: Any) -> None:
    """What torch.save lets out, of tensors larger than the file's buffer."""
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


@pytest.mark.parametrize("fail", [disk_full, zip_writer_on_a_full_disk])
@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_save_that_fails_is_told_and_leaves_older_checkpoints_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_mode: str, fail: Any
) -> None:
    run = SmallRun(tmp_path, config(interval=1, keep_latest_k=2, async_mode=async_mode))
    run.train_to(2)
    run.manager.wait()
    before = fingerprint(tmp_path)
    monkeypatch.setattr(FileSystemWriter, "write_data", fail)
    reason = "(No space left on device|full disk .*unexpected pos 704 vs 598.)"
    with pytest.raises(
        UserError,
        match=rf"step-3 could not be written: .*{reason}. [0-9,]+ bytes are free there. Older",
    ):
        run.train_to(3)
        run.manager.wait()
    monkeypatch.undo()
    assert fingerprint(tmp_path) == before
    assert SmallRun(tmp_path, config()).manager.load() == 2


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_another_error_of_a_save_is_not_taken_for_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_mode: str
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(FileSystemWriter, "write_data", fail)
    with pytest.raises(CheckpointException, match="illegal memory access"):
        SmallRun(tmp_path, config(interval=1, async_mode=async_mode)).train_to(1).manager.wait()


def test_a_failed_async_save_raises_once_at_the_next_wait_and_saving_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SmallRun(tmp_path, config(interval=1, async_mode="async"))
    monkeypatch.setattr(FileSystemWriter, "write_data", disk_full)
    run.train_to(1)
    with pytest.raises(UserError, match="step-1 could not be written"):
        run.manager.wait()
    monkeypatch.undo()
    run.train_to(2)
    run.manager.wait()
    assert SmallRun(tmp_path, config()).manager.load() == 2


def test_after_a_failure_the_save_in_flight_is_finished_and_its_own_failure_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = SmallRun(tmp_path, config(interval=1, async_mode="async")).train_to(1)
    run.manager.close()
    assert (tmp_path / "checkpoint" / "step-1" / ".metadata").exists()
    monkeypatch.setattr(FileSystemWriter, "write_data", disk_full)
    with pytest.raises(ZeroDivisionError):
        try:
            run.train_to(2)
            raise ZeroDivisionError
        finally:
            run.manager.close()
    assert "step-2 could not be written: [Errno 28] No space left" in caplog.text


# ---- where a run starts ----------------------------------------------------------------------


def test_a_half_written_newest_step_is_passed_over_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SmallRun(tmp_path, config()).train_to(4)
    (tmp_path / "checkpoint" / "step-4" / ".metadata").unlink()
    assert SmallRun(tmp_path, config()).manager.load() == 2
    assert "step-4 is skipped: it has no .metadata" in caplog.text
    assert "continuing from step-2" in caplog.text


def test_initial_load_path_brings_weights_only_and_starts_at_step_0(tmp_path: Path) -> None:
    source = SmallRun(tmp_path / "old", config()).train_to(2)
    path = str(tmp_path / "old" / "checkpoint" / "step-2")
    run = SmallRun(tmp_path / "new", config(initial_load_path=path), seed=3)
    fresh = run.whole()
    assert run.manager.load() == 0
    changed = differing(fresh, run.whole())
    assert changed == ["embedding.weight", "head.bias", "head.weight", "norm.weight"]
    assert torch.equal(run.model.head.weight, source.model.head.weight)


def test_initial_load_path_can_bring_everything(tmp_path: Path) -> None:
    source = SmallRun(tmp_path / "old", config()).train_to(2)
    path = str(tmp_path / "old" / "checkpoint" / "step-2")
    settings = config(initial_load_path=path, initial_load_model_only=False)
    run = SmallRun(tmp_path / "new", settings, seed=3)
    assert run.manager.load() == 2
    assert differing(source.whole(), run.whole()) == []


def test_a_job_with_a_step_of_its_own_ignores_initial_load_path_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SmallRun(tmp_path / "old", config()).train_to(2)
    path = str(tmp_path / "old" / "checkpoint" / "step-2")
    own = SmallRun(tmp_path / "new", config(initial_load_path=path))
    own.manager.load()
    own.train_to(4)
    again = SmallRun(tmp_path / "new", config(initial_load_path=path), seed=8)
    assert again.manager.load() == 4
    assert f"checkpoint.initial_load_path = {path} is ignored" in caplog.text
    assert differing(own.whole(), again.whole()) == []


@pytest.mark.parametrize(
    ("part", "kept_fresh"),
    [
        ("optimizer", {"head.weight/exp_avg", "head.weight/exp_avg_sq", "head.weight/step"}),
        ("lr_scheduler", {"lr"}),
        ("dataloader", {"lanes"}),
        ("rng", {"next random number"}),
        ("model", {"head.weight"}),
    ],
)
def test_an_excluded_part_keeps_its_fresh_value_and_the_rest_is_loaded(
    tmp_path: Path, part: str, kept_fresh: set[str]
) -> None:
    saved = SmallRun(tmp_path, config()).train_to(2).whole()
    run = SmallRun(tmp_path, config(exclude_from_loading=[part]), seed=4)
    assert run.manager.load() == 2
    not_loaded = set(differing(saved, run.whole()))
    assert kept_fresh <= not_loaded
    everything = {"head.weight", "head.weight/exp_avg", "lr", "lanes", "next random number"}
    assert (everything & not_loaded) == (everything & kept_fresh)


def test_without_its_train_state_a_run_starts_at_step_0_with_the_saved_weights(
    tmp_path: Path,
) -> None:
    saved = SmallRun(tmp_path, config()).train_to(2)
    run = SmallRun(tmp_path, config(exclude_from_loading=["train_state", "lr_scheduler"]), seed=4)
    assert run.manager.load() == 0
    assert torch.equal(run.model.head.weight, saved.model.head.weight)


# ---- what is refused -------------------------------------------------------------------------


def test_another_models_checkpoint_is_refused_with_the_differences_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    SmallRun(tmp_path, config(), identity="llama3").train_to(2)
    before = fingerprint(tmp_path)
    run = SmallRun(tmp_path, config(), width=10)
    fresh = run.whole()
    with pytest.raises(UserError) as refused:
        run.manager.load()
    text = str(refused.value)
    assert "  name: llama3 -> small (set by model.name)" in text
    assert "  flavor: width6 -> width10 (set by model.flavor)" in text
    assert "model.embedding.weight: shape [7, 6] in the checkpoint, [7, 10] in this run" in text
    assert fingerprint(tmp_path) == before
    assert differing(fresh, run.whole(), without=tuple(k for k in run.whole() if "/" in k)) == []


def test_missing_and_extra_parameters_are_both_named(tmp_path: Path) -> None:
    SmallRun(tmp_path, config()).train_to(2)
    run = SmallRun(tmp_path, config(exclude_from_loading=["optimizer"]))
    run.model.extra = nn.Parameter(torch.zeros(1))
    del run.model.head.bias
    run.model.head.register_parameter("bias", None)
    with pytest.raises(UserError) as refused:
        run.manager.load()
    assert "model.extra: not in the checkpoint" in str(refused.value)
    assert "model.head.bias: only in the checkpoint" in str(refused.value)


def test_an_equally_shaped_model_of_another_name_is_loaded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SmallRun(tmp_path, config(), identity="llama3").train_to(2)
    assert SmallRun(tmp_path, config(), identity="mine").manager.load() == 2
    assert "right shapes but was saved by another model" in caplog.text
    assert "name: llama3 -> mine (set by model.name)" in caplog.text
    assert "flavor" not in caplog.text, "which is the same"


def test_a_checkpoint_that_does_not_name_its_model_is_loaded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nameless = SmallRun(tmp_path, config())
    nameless.manager.model_identity = {}
    nameless.train_to(2)
    assert SmallRun(tmp_path, config()).manager.load() == 2
    assert "has the right shapes but does not say whose it is" in caplog.text


@pytest.mark.parametrize(("then", "now"), [("SGD", "AdamW"), ("AdamW", "SGD")])
def test_another_optimizers_state_is_refused_with_the_way_out(
    tmp_path: Path, then: Any, now: Any
) -> None:
    SmallRun(tmp_path, config(), optimizer=Optimizer(name=then)).train_to(2)
    run = SmallRun(tmp_path, config(), optimizer=Optimizer(name=now))
    with pytest.raises(UserError, match=r"optimizer\.state\.\S+exp_avg: (not|only) in the"):
        run.manager.load()
    afresh = config(exclude_from_loading=["optimizer"])
    assert SmallRun(tmp_path, afresh, optimizer=Optimizer(name=now)).manager.load() == 2


def test_sgd_which_has_no_state_resumes(tmp_path: Path) -> None:
    saved = SmallRun(tmp_path, config(), optimizer=Optimizer(name="SGD")).train_to(2)
    run = SmallRun(tmp_path, config(), optimizer=Optimizer(name="SGD"), seed=4)
    assert run.manager.load() == 2
    assert differing(saved.whole(), run.whole()) == []


def test_what_the_loader_refuses_is_a_users_error(tmp_path: Path) -> None:
    SmallRun(tmp_path, config()).train_to(2)
    with pytest.raises(UserError, match="4 lanes were saved, not 8"):
        SmallRun(tmp_path, config(), num_lanes=8).manager.load()


def test_bytes_damaged_inside_a_shard_are_a_users_error(tmp_path: Path) -> None:
    SmallRun(tmp_path, config()).train_to(2)
    shard = tmp_path / "checkpoint" / "step-2" / "__0_0.distcp"
    shard.write_bytes(b"\0" * shard.stat().st_size)
    with pytest.raises(UserError, match=r"step-2 cannot be read: .*Move that folder away"):
        SmallRun(tmp_path, config()).manager.load()


def test_a_checkpoint_is_an_ordinary_dcp_folder(tmp_path: Path) -> None:
    """Other tools read it by its keys alone."""
    run = SmallRun(tmp_path, config()).train_to(2)
    weight = torch.empty(5, 6)
    dcp.load({"model.head.weight": weight}, checkpoint_id=tmp_path / "checkpoint" / "step-2")
    assert torch.equal(weight, run.model.head.weight)
