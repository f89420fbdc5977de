"""Which step folder is complete, which one a run starts from, which ones a purge removes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from torchtitan_lc.components.checkpoint_folders import (
    choose_start,
    find_latest,
    inspect,
    purge,
)
from torchtitan_lc.components.checkpoint_reading import no_single_process_warning
from torchtitan_lc.config.job_config import Checkpoint
from torchtitan_lc.tools.errors import UserError


def checkpoint_problems(config: Checkpoint, dump_folder: Path) -> list[str]:
    """What choose_start refuses, as a list of at most one."""
    try:
        choose_start(config, dump_folder, steps=101)
    except UserError as error:
        return [str(error)]
    return []


def config(**changes: Any) -> Checkpoint:
    return Checkpoint(**({"enable": True} | changes))


def write_step(dump_folder: Path, step: int, *, model_only: bool = False) -> Path:
    """A real, if tiny, checkpoint."""
    path = dump_folder / "checkpoint" / f"step-{step}"
    state: dict[str, Any] = {"model.weight": torch.ones(3)}
    if not model_only:
        state["train_state"] = torch.tensor(step)
    with no_single_process_warning():
        dcp.save(state, checkpoint_id=path)
    return path


def drop_metadata(path: Path) -> None:
    (path / ".metadata").unlink()


def drop_a_shard(path: Path) -> None:
    (path / "__0_0.distcp").unlink()


def cut_a_shard(path: Path) -> None:
    shard = path / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])


def scribble_metadata(path: Path) -> None:
    (path / ".metadata").write_bytes(b"not a pickle")


def empty_metadata(path: Path) -> None:
    (path / ".metadata").write_bytes(b"")


BREAKS = {
    drop_metadata: "it has no .metadata, which is written last",
    drop_a_shard: "__0_0.distcp, which .metadata names, is missing",
    cut_a_shard: "__0_0.distcp has ",
    scribble_metadata: "its .metadata cannot be read (UnpicklingError",
    empty_metadata: "its .metadata cannot be read (EOFError",
}


def steps_in(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in folder.iterdir())


# ---- completeness ----------------------------------------------------------------------------


def test_a_folder_as_dcp_leaves_it_is_complete(tmp_path: Path) -> None:
    found = inspect(write_step(tmp_path, 7), 7)
    assert (found.state, found.step, found.reason) == ("complete", 7, "")
    assert found.resumable


@pytest.mark.parametrize("break_it", BREAKS)
def test_a_folder_that_lacks_bytes_is_not_complete_and_says_which(
    tmp_path: Path, break_it: Any
) -> None:
    path = write_step(tmp_path, 7)
    break_it(path)
    found = inspect(path, 7)
    assert found.state != "complete" and not found.resumable
    assert found.reason.startswith(BREAKS[break_it])


def test_weights_alone_cannot_be_resumed_from(tmp_path: Path) -> None:
    found = inspect(write_step(tmp_path, 7, model_only=True), 7)
    assert found.state == "complete" and found.model_only and not found.resumable


# ---- where a run starts ----------------------------------------------------------------------


def test_the_newest_step_is_chosen_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        write_step(tmp_path, step)
    assert choose_start(config(), tmp_path).path == tmp_path / "checkpoint" / "step-100"


@pytest.mark.parametrize("break_it", BREAKS)
def test_the_older_complete_step_is_chosen_and_the_broken_newer_one_named(
    tmp_path: Path, break_it: Any
) -> None:
    write_step(tmp_path, 5)
    break_it(write_step(tmp_path, 99))
    start = choose_start(config(), tmp_path)
    assert start.path == tmp_path / "checkpoint" / "step-5"
    (note,) = start.notes
    assert "step-99 is skipped: " + BREAKS[break_it] in note
    assert note.endswith("continuing from step-5")


def test_a_broken_step_older_than_the_chosen_one_is_not_mentioned(tmp_path: Path) -> None:
    drop_metadata(write_step(tmp_path, 5))
    write_step(tmp_path, 99)
    assert choose_start(config(), tmp_path).notes == ()


def test_newer_weights_are_passed_over_for_an_older_full_step(tmp_path: Path) -> None:
    write_step(tmp_path, 90)
    write_step(tmp_path, 100, model_only=True)
    start = choose_start(config(), tmp_path)
    assert start.path == tmp_path / "checkpoint" / "step-90"
    assert "step-100 is skipped: it holds model weights only" in start.notes[0]


def test_weights_alone_are_refused_with_the_way_to_use_them(tmp_path: Path) -> None:
    path = write_step(tmp_path, 100, model_only=True)
    (problem,) = checkpoint_problems(config(), tmp_path)
    assert "holds model weights only" in problem
    assert f"checkpoint.initial_load_path = {str(path)!r}" in problem


@pytest.mark.parametrize("newer", [None, drop_metadata])
@pytest.mark.parametrize("older", [90, None])
def test_weights_alone_of_the_last_step_or_a_later_one_are_the_end_of_the_run(
    tmp_path: Path, older: int | None, newer: Any
) -> None:
    path = write_step(tmp_path, 100, model_only=True)
    if older:
        write_step(tmp_path, older)
    if newer:
        newer(write_step(tmp_path, 110))
    for steps in (100, 95):
        start = choose_start(config(), tmp_path, steps=steps)
        assert (start.path, start.finished, start.model_only) == (path, 100, True)
        more = "goes on from step-90" if older else "cannot go on from it"
        assert f"{path} holds model weights only" in start.notes[-1] and more in start.notes[-1]


def test_weights_alone_end_no_run_that_starts_its_steps_anew(tmp_path: Path) -> None:
    write_step(tmp_path, 90)
    write_step(tmp_path, 100, model_only=True)
    anew = config(exclude_from_loading=["train_state", "lr_scheduler"])
    start = choose_start(anew, tmp_path, steps=100)
    assert start.path == tmp_path / "checkpoint" / "step-90" and start.finished is None


def test_weights_alone_pass_for_the_end_where_the_number_of_steps_is_not_known(
    tmp_path: Path,
) -> None:
    path = write_step(tmp_path, 100, model_only=True)
    source_is_gone = config(initial_load_path=str(tmp_path / "gone"))
    for settings in (config(), source_is_gone):
        start = choose_start(settings, tmp_path)
        assert (start.path, start.finished) == (path, 100)
    older = write_step(tmp_path, 90)
    assert choose_start(config(), tmp_path).path == older


def test_a_first_save_that_never_finished_lets_the_run_start_again(tmp_path: Path) -> None:
    drop_metadata(write_step(tmp_path, 5))
    start = choose_start(config(), tmp_path)
    assert start.path is None
    assert "step-5 is skipped" in start.notes[0] and "nothing older" in start.notes[0]


def test_finished_checkpoints_that_are_all_damaged_stop_the_run(tmp_path: Path) -> None:
    """Starting over would train those steps again and write over what might be repaired."""
    cut_a_shard(write_step(tmp_path, 5))
    drop_metadata(write_step(tmp_path, 10))
    (problem,) = checkpoint_problems(config(), tmp_path)
    assert "no complete checkpoint is left" in problem and "step-5: __0_0.distcp has" in problem


def test_other_names_in_the_folder_are_ignored(tmp_path: Path) -> None:
    write_step(tmp_path, 3)
    for name in ("step-abc", "step-7.tmp", "old-step-9", "step-"):
        (tmp_path / "checkpoint" / name).mkdir()
    (tmp_path / "checkpoint" / "step-50").write_text("a file")
    found, notes = find_latest(tmp_path / "checkpoint")
    assert found is not None and found.step == 3 and notes == []


def named(note: str, folder: Path) -> set[str]:
    """The step folders below ``folder`` that are named up to the verb."""
    listed = note.split(": ", 1)[1].split(" will ")[0]
    return {str(Path(path).relative_to(folder)) for path in listed.split(", ")}


def test_load_step_goes_back_and_names_what_is_replaced_and_how_to_keep_it(tmp_path: Path) -> None:
    for step in (5, 9, 10, 13, 15, 20):
        write_step(tmp_path, step)
    for step in (5, 10, 12, 15, 20):
        (tmp_path / "hf" / f"step-{step}").mkdir(parents=True)
    settings = config(load_step=9, interval=5, hf_interval=4, last_save_in_hf=True)
    start = choose_start(settings, tmp_path, steps=15)
    assert start.path == tmp_path / "checkpoint" / "step-9"
    replaced, stay = start.notes
    steps = {"checkpoint/step-10", "checkpoint/step-15"}
    assert named(replaced, tmp_path) == steps | {"hf/step-12", "hf/step-15"}
    assert "job.dump_folder" in replaced and "another checkpoint.folder" in replaced
    assert f"checkpoint.initial_load_path = {str(start.path)!r}" in replaced
    steps = {"checkpoint/step-13", "checkpoint/step-20"}
    assert named(stay, tmp_path) == steps | {"hf/step-10", "hf/step-20"}
    assert (
        "will not be replaced" in stay and "without load_step will continue from the newest" in stay
    )


def test_load_step_of_a_run_that_saves_nothing_replaces_nothing(tmp_path: Path) -> None:
    for step in (5, 10):
        write_step(tmp_path, step)
    settings = config(load_step=5, interval=5, load_only=True)
    (stay,) = choose_start(settings, tmp_path, steps=10).notes
    assert named(stay, tmp_path) == {"checkpoint/step-10"} and "will not be replaced" in stay
    assert choose_start(config(load_step=10), tmp_path, steps=10).notes == ()


@pytest.mark.parametrize(
    ("step", "reason"),
    [(7, "there is no such folder"), (10, "it has no .metadata"), (15, "model weights only")],
)
def test_a_load_step_that_cannot_be_resumed_is_refused_with_those_that_can(
    tmp_path: Path, step: int, reason: str
) -> None:
    write_step(tmp_path, 5)
    drop_metadata(write_step(tmp_path, 10))
    write_step(tmp_path, 15, model_only=True)
    (problem,) = checkpoint_problems(config(load_step=step), tmp_path)
    assert f"checkpoint.load_step = {step}" in problem and reason in problem
    assert problem.endswith("Steps that can be resumed there: 5")


@pytest.mark.parametrize("what", ["missing", "parent", "half-written"])
def test_an_initial_load_path_that_is_no_checkpoint_is_refused(tmp_path: Path, what: str) -> None:
    path = write_step(tmp_path / "old", 5)
    if what == "half-written":
        drop_metadata(path)
    named = {"missing": path.with_name("step-6"), "parent": path.parent}.get(what, path)
    (problem,) = checkpoint_problems(config(initial_load_path=str(named)), tmp_path / "new")
    assert f"checkpoint.initial_load_path = {str(named)!r}" in problem
    assert "Name a step folder itself" in problem


def test_weights_alone_can_start_a_run_but_not_bring_an_optimizer(tmp_path: Path) -> None:
    path = write_step(tmp_path / "old", 5, model_only=True)
    start = choose_start(config(initial_load_path=str(path)), tmp_path / "new")
    assert (start.path, start.model_only) == (path, True)
    everything = config(initial_load_path=str(path), initial_load_model_only=False)
    (problem,) = checkpoint_problems(everything, tmp_path / "new")
    assert "leave checkpoint.initial_load_model_only at true" in problem


def test_an_unknown_part_to_exclude_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    (problem,) = checkpoint_problems(config(exclude_from_loading=["optimiser"]), tmp_path)
    assert "unknown optimiser; use model, optimizer, lr_scheduler, dataloader" in problem


def test_a_file_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("")
    (problem,) = checkpoint_problems(config(), tmp_path)
    assert "checkpoint is a file" in problem


def test_the_questions_need_no_process_group_and_leave_no_trace(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    assert checkpoint_problems(config(), tmp_path / "not there yet") == []
    assert not (tmp_path / "not there yet").exists()


def test_a_disabled_checkpoint_has_no_problems(tmp_path: Path) -> None:
    write_step(tmp_path, 100, model_only=True)
    disabled = Checkpoint(enable=False, load_step=3)
    assert checkpoint_problems(disabled, tmp_path) == []


# ---- purge -----------------------------------------------------------------------------------


def test_the_newest_two_of_9_10_90_100_1000_are_100_and_1000(tmp_path: Path) -> None:
    for step in (9, 10, 90, 100, 1000):
        write_step(tmp_path, step)
    folder = tmp_path / "checkpoint"
    assert sorted(purge(folder, 2, just_saved=1000)) == [9, 10, 90]
    assert steps_in(folder) == [100, 1000]


def test_keeping_zero_keeps_all(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_step(tmp_path, step)
    assert purge(tmp_path / "checkpoint", 0, just_saved=3) == []
    assert steps_in(tmp_path / "checkpoint") == [1, 2, 3]


@pytest.mark.parametrize("break_it", BREAKS)
def test_incomplete_steps_neither_count_nor_go(tmp_path: Path, break_it: Any) -> None:
    for step in (1, 2, 3, 5):
        write_step(tmp_path, step)
    for step in (4, 6):
        break_it(write_step(tmp_path, step))
    assert sorted(purge(tmp_path / "checkpoint", 2, just_saved=5)) == [1, 2]
    assert steps_in(tmp_path / "checkpoint") == [3, 4, 5, 6]


def test_the_newest_full_step_stays_however_many_newer_weights_there_are(tmp_path: Path) -> None:
    for step in (1, 2):
        write_step(tmp_path, step)
    for step in (3, 4):
        write_step(tmp_path, step, model_only=True)
    assert purge(tmp_path / "checkpoint", 2, just_saved=4) == [1]
    assert steps_in(tmp_path / "checkpoint") == [2, 3, 4]


def test_a_step_saved_after_going_back_is_not_removed_at_once(tmp_path: Path) -> None:
    for step in (50, 60, 90, 100):
        write_step(tmp_path, step)
    purge(tmp_path / "checkpoint", 2, just_saved=60)
    assert steps_in(tmp_path / "checkpoint") == [60, 90, 100]


@pytest.mark.parametrize("break_it", BREAKS)
def test_nothing_is_removed_when_the_new_save_did_not_get_through(
    tmp_path: Path, break_it: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        write_step(tmp_path, step)
    break_it(write_step(tmp_path, 4))
    assert purge(tmp_path / "checkpoint", 2, just_saved=4) == []
    assert steps_in(tmp_path / "checkpoint") == [1, 2, 3, 4]
    assert "step-4" in caplog.text


def test_a_folder_half_removed_never_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        write_step(tmp_path, step)

    def fail(path: Path) -> None:
        raise PermissionError(f"{path} belongs to somebody else")

    monkeypatch.setattr("shutil.rmtree", fail)
    assert purge(tmp_path / "checkpoint", 2, just_saved=3) == []
    assert "step-1 could not be removed" in caplog.text
    assert inspect(tmp_path / "checkpoint" / "step-1", 1).state == "unfinished"


def test_the_step_that_a_run_went_back_to_is_not_purged(tmp_path: Path) -> None:
    for step in (5, 6, 7, 8):
        write_step(tmp_path, step)
    # Back to step 6 by load_step, trained on to 7; 8 is of the run that was left.
    assert purge(tmp_path / "checkpoint", 2, just_saved=7, base=6) == [5]


def test_the_step_cannot_start_anew_under_a_schedule_that_goes_on(tmp_path: Path) -> None:
    (problem,) = checkpoint_problems(config(exclude_from_loading=["train_state"]), tmp_path)
    assert "lr_scheduler" in problem
    both = config(exclude_from_loading=["train_state", "lr_scheduler"])
    assert checkpoint_problems(both, tmp_path) == []
