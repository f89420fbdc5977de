"""One job per dump folder: a second one would overwrite the first one's checkpoints.

The launcher holds an advisory lock (flock) on <dump_folder>/.lock while its workers run. The kernel takes it
back when the process ends, however it ends, so that a file left behind blocks nobody. Workers do not inherit
it: where the launcher is killed, they end with it (tools/parent.py; on Linux).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.logging import logger

NAME = ".lock"

# What flock says where a file system has no locks: Lustre without the mount option `flock` has ENOSYS.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


@contextmanager
def held(folder: Path, job: str | None = None, patience: float = 5.0) -> Iterator[None]:
    """Hold the lock of ``folder``, which is made if need be. Raises UserError while another job has it.

    job: what all nodes of one job call it, None for a job of one node. Nodes of one job do not refuse each
    other: the first has the lock. patience: seconds in which who has it has to have written its name, which
    a network file system may show late.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / NAME).open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"job.dump_folder = {str(folder)!r}: {error.filename}: {error.strerror}; name another folder, "
            "or make this one writable"
        ) from error
    with file:
        if _take(file, folder):
            _write_name(file, job)
        else:
            _check_holder(folder, job, patience)
        yield


def _take(file: TextIO, folder: Path) -> bool:
    """Whether this process may go on as the one that holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning(
            f"job.dump_folder = {str(folder)!r}: its file system has no locks ({error.strerror}), so a "
            "second job in this folder would not be noticed; start none"
        )
    return True


def _write_name(file: TextIO, job: str | None) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    file.truncate(0)
    json.dump({"host": socket.gethostname(), "pid": os.getpid(), "since": since, "job": job}, file)
    file.flush()
    os.fsync(file.fileno())  # other nodes read it


def _check_holder(folder: Path, job: str | None, patience: float) -> None:
    """UserError unless another node of this job holds the lock."""
    deadline = time.monotonic() + patience
    while True:
        holder = _holder(folder)
        if holder and job is not None and holder["job"] == job:
            return
        if (holder and job is None) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    who, stop = "another job", "stop that job"
    if holder:
        who = f"a job on {holder['host']}, process {holder['pid']}, since {holder['since']}"
        stop = f"stop that job (kill {holder['pid']} on {holder['host']})"
    raise UserError(
        f"job.dump_folder = {str(folder)!r} is in use by {who}: two jobs in one folder would overwrite each "
        f"other's checkpoints. Name another job.dump_folder, or {stop}"
    )


def _holder(folder: Path) -> dict[str, object]:
    """What the process that holds the lock has written; {} where it has not yet."""
    try:
        written: dict[str, object] = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return written
