"""Writing a step folder, now or beside training, and saying why it could not be written."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from torchtitan_lc.components.checkpoint_reading import first_failure, no_single_process_warning
from torchtitan_lc.tools.errors import UserError

# torch.save on a full disk: its zip writer ends the file after the write that failed, finds that bytes
# are missing, and of the two errors this one gets out.
_ZIP_WRITER = ("inline_container.cc", "PytorchStreamWriter")


def write(state: dict[str, Any], path: Path, group: dist.ProcessGroup | None) -> None:
    """Write all of ``state`` to the empty folder ``path``. Collective. Raises UserError if that fails."""
    try:
        with no_single_process_warning():
            dcp.save(state, **_arguments(path, group))
    except CheckpointException as error:
        raise explained(error, path) from error


def start(state: dict[str, Any], path: Path, group: dist.ProcessGroup | None) -> Future[Any]:
    """Copy ``state`` to host memory, and write it while training goes on. Collective."""
    return cast("Future[Any]", dcp.async_save(state, **_arguments(path, group)))


def wait(writing: Future[Any], path: Path) -> None:
    """Wait for what `start` began. Raises UserError if it could not be written."""
    try:
        writing.result()
    except CheckpointException as error:
        raise explained(error, path) from error


def explained(error: BaseException, path: Path) -> BaseException:
    """A UserError for files that could not be written; any other error as it is."""
    if not isinstance(error, CheckpointException):
        return error
    failure = first_failure(error)
    if isinstance(failure, OSError):
        reason = str(failure)
    elif isinstance(failure, RuntimeError) and any(name in str(failure) for name in _ZIP_WRITER):
        reason = f"torch.save could not write all bytes, as on a full disk ({failure})"
    else:
        return error
    return UserError(
        f"checkpoint {path} could not be written: {reason}. {free_at(path)}. Older checkpoints are "
        "untouched; make room (or lower checkpoint.keep_latest_k) and run the same command to continue "
        "from the newest one"
    )


def free_at(path: Path) -> str:
    """How much room is left where ``path`` lies, in words."""
    try:
        return f"{shutil.disk_usage(path).free:,} bytes are free there"
    except OSError as error:
        return f"How much is free there cannot be read ({error})"


def _arguments(path: Path, group: dist.ProcessGroup | None) -> dict[str, Any]:
    return {
        # Not a FileSystemWriter: async_save would also stage with it, and older torch then
        # copies no CPU tensors, so that the next step lands in this file (pytorch#144657).
        "checkpoint_id": path,
        "planner": DefaultSavePlanner(flatten_state_dict=False),
        "process_group": group,
    }
