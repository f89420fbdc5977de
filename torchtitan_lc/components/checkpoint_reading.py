"""What a DCP folder contains, and getting it out.

    step-50/.metadata     every saved key: shape and dtype, and where its bytes lie
    step-50/*.distcp      the bytes

DCP fills the keys of the dict that it is given. So a reader first asks ``.metadata`` which keys
there are, which costs no tensor and no collective.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageReader

from torchtitan_lc.components.checkpoint_identity import differing
from torchtitan_lc.tools.errors import UserError


def read_metadata(path: Path) -> Metadata:
    """DCP's own description of a checkpoint: saved keys with shapes, and where their bytes lie."""
    return FileSystemReader(path).read_metadata()


def saved_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Key -> shape of every saved entry; () for a plain value as for a 0-d tensor."""
    saved = read_metadata(path).state_dict_metadata
    return {key: tuple(getattr(entry, "size", ())) for key, entry in saved.items()}


def differences(saved: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> list[str]:
    """One line per name or shape that differs, the model before the
    optimizer; [] when the two agree."""
    lines = [f"{key}: not in the checkpoint" for key in sorted(wanted.keys() - saved.keys())]
    lines += [f"{key}: only in the checkpoint" for key in sorted(saved.keys() - wanted.keys())]
    lines += [
        f"{key}: shape {list(saved[key])} in the checkpoint, {list(wanted[key])} in this run"
        for key in sorted(saved.keys() & wanted.keys())
        if saved[key] != wanted[key]
    ]
    return sorted(lines)


def misfit(
    path: Path, parts: list[str], wanted: dict[str, tuple[int, ...]], identity: dict[str, Any]
) -> str | None:
    """Why the checkpoint cannot fill ``wanted`` (key -> shape, keys as saved), None when it can.

    parts: which of "model" and "optimizer" are to be loaded; a run that takes the model alone does
    not miss the rest. Not read off ``wanted``: plain SGD has no tensors, and would not miss AdamW's.
    """
    kinds = tuple(f"{part}." for part in parts)
    saved = {k: shape for k, shape in saved_shapes(path).items() if k.startswith(kinds)}
    lines = differences(saved, wanted)
    if not lines:
        return None
    more = f"  and {len(lines) - 5} more\n" if len(lines) > 5 else ""
    return (
        f"checkpoint {path} does not fit this run's model and optimizer (saved -> this run's):\n"
        + "".join(f"  {line}\n" for line in differing(read_identity(path), identity))
        + "".join(f"  {line}\n" for line in lines[:5])
        + more
        + "Use the config that wrote it, or another job.dump_folder. (If only optimizer keys "
        "differ, checkpoint.exclude_from_loading = optimizer starts it afresh.)"
    )


def read_identity(path: Path) -> dict[str, Any]:
    """What the run that saved this called its model; {} if the checkpoint does not say."""
    if "identity" not in read_metadata(path).state_dict_metadata:
        return {}
    state: dict[str, Any] = {"identity": {}}
    read_into(state, path, alone=True)
    return dict(state["identity"])


def read_into(
    state: dict[str, Any],
    path: Path,
    group: dist.ProcessGroup | None = None,
    *,
    alone: bool = False,
    reader: StorageReader | None = None,
    advice: str = "Move that folder away to continue from the step before it",
) -> None:
    """Fill ``state`` from a checkpoint: tensors in place, whole or sharded; plain values replaced.

    reader: of another format than a step folder's. Collective over ``group``, unless ``alone``.
    Raises UserError, on every rank, if something cannot be read; it ends with ``advice``.
    """
    # Flattening of either kind would put plain values into a copy of the dict, where they are lost.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with no_single_process_warning():
            dcp.load(
                state,
                checkpoint_id=path,
                storage_reader=reader,
                planner=planner,
                process_group=group,
                no_dist=alone,
            )
    except CheckpointException as error:
        raise UserError(
            f"checkpoint {path} cannot be read: {first_failure(error)!r}. {advice}"
        ) from error


def first_failure(error: CheckpointException) -> BaseException:
    """What went wrong on the lowest rank that failed."""
    return error.failures[min(error.failures)][0]


@contextmanager
def no_single_process_warning() -> Iterator[None]:
    """DCP warns when it runs without a process group; here that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
