"""A worker's start: who checks the job, and who says what is only worth a warning."""

from __future__ import annotations

import os
from typing import Any

import pytest

from torchtitan_lc import train
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.parent import LAUNCHER_PID

OLD_NAME = ["--training.batch_size", "3"]


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """(world size, quiet) of each check of the job that a worker asks for, of no launcher's."""
    calls: list[tuple[int, bool]] = []

    def check(config: JobConfig, world_size: int, device_type: str, *, quiet: bool) -> None:
        calls.append((world_size, quiet))

    monkeypatch.setattr(train, "check_job", check)
    for name in (LAUNCHER_PID, "RANK", "WORLD_SIZE", "CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_by_hand_a_process_checks_and_warns_itself(
    checks: list[tuple[int, bool]], caplog: pytest.LogCaptureFixture
) -> None:
    assert train.checked_config(OLD_NAME).training.local_batch_size == 3
    assert checks == [(1, False)]
    assert "is now called training.local_batch_size" in caplog.text


def test_under_plain_torchrun_every_rank_checks_and_the_first_warns(
    checks: list[tuple[int, bool]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        train.checked_config(OLD_NAME)
    assert checks == [(2, False), (2, True)]
    assert caplog.text.count("is now called") == 1


def test_what_the_launcher_has_checked_and_said_is_not_repeated(
    checks: list[tuple[int, bool]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(LAUNCHER_PID, str(os.getppid()))
    assert train.checked_config(OLD_NAME).training.local_batch_size == 3
    assert checks == [] and caplog.text == ""


@pytest.mark.parametrize("flag", ["--plan", "--dry_run"])
def test_a_worker_does_not_train_where_a_plan_or_a_dry_run_is_asked_for(
    flag: str, checks: list[tuple[int, bool]]
) -> None:
    with pytest.raises(UserError, match=r"give them to run_train.sh"):
        train.checked_config([flag])
    assert checks == []


@pytest.mark.parametrize("is_launched", [True, False])
def test_only_a_worker_of_the_launcher_ends_with_its_parent(
    is_launched: bool, checks: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(train, "end_with_launcher", lambda: done.append("bound"))
    monkeypatch.setattr(train, "run", lambda config: done.append("ran"))
    monkeypatch.setattr(train, "init_logger", lambda: None)
    if is_launched:
        monkeypatch.setenv(LAUNCHER_PID, str(os.getppid()))
    assert train.main([]) == 0
    # A shell may end before a job that it started with nohup.
    assert done == (["bound", "ran"] if is_launched else ["ran"])


@pytest.mark.parametrize(("rank", "shown"), [("0", "torchtitan_lc cannot go on:\nno\n"), ("1", "")])
def test_a_users_mistake_is_said_by_one_rank_and_ends_all(
    rank: str,
    shown: str,
    checks: list[tuple[int, bool]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(config: JobConfig) -> None:
        raise UserError("no")

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(train, "run", refuse)
    monkeypatch.setattr(train, "init_logger", lambda: None)
    assert train.main([]) == 2
    assert capsys.readouterr().err == shown
