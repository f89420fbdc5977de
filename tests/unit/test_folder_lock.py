"""The lock of a dump folder: who is refused, what is said, and that nothing stays locked."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_lc.tools import folder_lock
from torchtitan_lc.tools.errors import UserError

ROOT = Path(__file__).resolve().parents[2]

# Holds the lock with a child as a worker is one, and says both process ids.
HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from torchtitan_lc.tools.folder_lock import held

with held(Path(sys.argv[1])):
    child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_the_refusal_names_folder_holder_and_fix_and_a_killed_holder_blocks_nobody(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "new" / "job"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(UserError) as raised, folder_lock.held(folder):
            pass
        text = str(raised.value)
        for word in (
            f"job.dump_folder = '{folder}' is in use",
            f"on {socket.gethostname()}, process {holder.pid}, since 20",
            "another job.dump_folder",
            f"kill {holder.pid}",
        ):
            assert word in text, (word, text)
        holder.kill()
        holder.wait()
        with folder_lock.held(folder):  # though the child lives, and the file is still there
            os.kill(child, 0)
    finally:
        holder.kill()
        holder.communicate()
        os.kill(child, signal.SIGKILL)


def test_a_lock_is_free_again_once_the_job_has_ended(tmp_path: Path) -> None:
    for _ in range(2):
        with folder_lock.held(tmp_path):
            pass


def test_a_holder_that_has_not_said_its_name_refuses_too(tmp_path: Path) -> None:
    with (
        (tmp_path / folder_lock.NAME).open("w") as file,
        pytest.raises(UserError, match=r"in use by another job: .* stop that job"),
    ):
        fcntl.flock(file, fcntl.LOCK_EX)
        with folder_lock.held(tmp_path, patience=0.2):
            pass


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING, "torchtitan_lc"), folder_lock.held(tmp_path):
        (record,) = caplog.records
    assert str(tmp_path) in record.message and os.strerror(code) in record.message


def test_a_folder_that_cannot_be_made_is_a_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "deep"
    with pytest.raises(UserError) as raised, folder_lock.held(folder):
        pass
    assert str(raised.value).startswith(f"job.dump_folder = '{folder}': ")
    assert "Not a directory; name another folder" in str(raised.value)
