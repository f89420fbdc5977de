"""A launcher that is killed takes its workers along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _stat(pid: int) -> list[str]:
    """State, parent and so on of a process, as in /proc/PID/stat after the name; [] if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _children(parent: int) -> list[int]:
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if _stat(pid)[1:2] == [str(parent)]]


def _soon(is_true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_no_worker_goes_on_training_after_its_launcher_was_killed(tmp_path: Path) -> None:
    flags = [
        "--training.seq_len=128",
        "--training.steps=1000000",
        "--checkpoint.enable=false",
        f"--job.dump_folder={tmp_path / 'job'}",
    ]
    with open(tmp_path / "output", "w") as output:
        launcher = subprocess.Popen(
            [str(ROOT / "run_train.sh"), *flags],
            env={**os.environ, "PYTHON": sys.executable, "NGPU": "2"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    workers: list[int] = []
    try:
        is_training = _soon(lambda: "step:  1  loss:" in (tmp_path / "output").read_text(), 60)
        workers = _children(launcher.pid)
        assert is_training and len(workers) == 2, (tmp_path / "output").read_text()
        launcher.kill()
        assert launcher.wait() == -signal.SIGKILL
        assert _soon(lambda: all(_stat(pid)[:1] in ([], ["Z"]) for pid in workers), 10)
    finally:
        launcher.kill()
        for pid in workers:
            if "torchtitan_lc.train" in _command(pid):
                os.kill(pid, signal.SIGKILL)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
