"""Step folders on disk: which are complete, which one a run starts from, which ones may go.

    outputs/checkpoint/
      step-50/    __0_0.distcp  __1_0.distcp  .metadata   complete
      step-100/   __0_0.distcp                            unfinished: .metadata is written last
      step-150/   __0_0.distcp  .metadata                 damaged: .metadata names __1_0.distcp

Highest number is not enough to choose a folder: a run killed while it saved leaves the highest one
half-written. A folder is complete when its ``.metadata`` can be read and every file named in it is
there with at least the bytes that are said to lie in it. (The content of the bytes is not checked;
DCP keeps no checksums.)

Nothing here needs a process group, so the launcher asks the same questions before it starts a
worker. Steps are compared as numbers: as text, step-1000 would sort before step-200.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch.distributed.checkpoint.metadata import Metadata

from torchtitan_lc.components.checkpoint_reading import read_metadata
from torchtitan_lc.components.hf_folder import has_weights
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.logging import logger

if TYPE_CHECKING:
    from torchtitan_lc.config.job_config import Checkpoint as CheckpointConfig

# The names that checkpoint.exclude_from_loading knows; each is one prefix of the saved keys.
PARTS = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state", "rng")


@dataclass(frozen=True)
class StepFolder:
    """What lies in one step folder. ``reason`` says why it is not complete, in words."""

    path: Path
    step: int
    state: Literal["complete", "unfinished", "damaged"]
    reason: str = ""
    model_only: bool = False

    @property
    def resumable(self) -> bool:
        return self.state == "complete" and not self.model_only


@dataclass(frozen=True)
class Start:
    """Where a run begins. ``path`` None: nothing is loaded; with ``in_hf`` it is a folder of Hugging
    Face weights, else a step folder. ``finished``: the step of a folder of weights alone, with which the
    run is complete. ``notes`` are warnings for the user."""

    path: Path | None = None
    model_only: bool = False
    in_hf: bool = False
    finished: int | None = None
    notes: tuple[str, ...] = ()


def checkpoint_folder(config: CheckpointConfig, dump_folder: str | Path) -> Path:
    return Path(dump_folder) / config.folder


def exports_folder(dump_folder: str | Path) -> Path:
    """Where the run's Hugging Face folders lie."""
    return Path(dump_folder) / "hf"


def choose_start(
    config: CheckpointConfig,
    dump_folder: str | Path,
    hf_assets_path: str = "",
    steps: float | None = None,
) -> Start:
    """The job's own newest resumable step, else ``initial_load_path``, else nothing.

    hf_assets_path: of the model; the default of ``initial_load_path`` with ``initial_load_in_hf``.
    steps: training.steps, from which on weights alone are the end of the run. None: not known, and if
    there is no full step, weights alone are taken for that.

    Raises UserError when the asked-for step is missing or unusable, when only model weights are
    left to resume from, when every finished checkpoint is damaged, when ``initial_load_path`` is no
    complete checkpoint, or when ``exclude_from_loading`` names something unknown.
    """
    if not config.enable:
        return Start(notes=tuple(_weights_left_unread(hf_assets_path)))
    unknown = [name for name in config.exclude_from_loading if name not in PARTS]
    if unknown:
        raise UserError(
            f"checkpoint.exclude_from_loading: unknown {', '.join(unknown)}; use {', '.join(PARTS)}"
        )
    if "train_state" in config.exclude_from_loading and (
        "lr_scheduler" not in config.exclude_from_loading
    ):
        raise UserError(
            "checkpoint.exclude_from_loading names train_state, which holds the step, but not "
            "lr_scheduler: the step would start at 0 and the schedule elsewhere. Name both or neither"
        )
    folder = checkpoint_folder(config, dump_folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(
            f"checkpoint.folder: {folder} is a file; name another folder or move it away"
        )
    chosen: StepFolder | None
    if config.load_step >= 0:
        chosen, notes = _asked_for(folder, config, Path(dump_folder), steps)
    else:
        # Where train_state is left out, the step starts at 0 and no folder is the end of the run.
        starts_over = "train_state" in config.exclude_from_loading
        chosen, notes = find_latest(folder, math.inf if starts_over else steps)
    if chosen is None:
        return _initial(config, notes, hf_assets_path)
    if config.initial_load_path:
        notes.append(
            f"checkpoint.initial_load_path = {config.initial_load_path} is ignored: "
            f"{folder} already holds {chosen.path.name}, which this run continues"
        )
    if chosen.model_only:
        return Start(chosen.path, model_only=True, finished=chosen.step, notes=tuple(notes))
    return Start(chosen.path, notes=tuple(notes))


def find_latest(
    folder: Path, steps: float | None = math.inf
) -> tuple[StepFolder | None, list[str]]:
    """The newest step that training can resume from, and a note for each newer one passed over; or
    weights alone of a newer step, if that is at least ``steps`` (or ``steps`` is None, and there is
    nothing else).

    Raises UserError if what is left is of no use for resuming: model weights only, or damaged.
    """
    passed_over: list[StepFolder] = []
    for found in step_folders(folder):
        notes = [_passed_over(other, found) for other in passed_over]
        if found.resumable:
            return found, notes
        if found.model_only and steps is not None and found.step >= steps:
            return found, [*notes, _end_of_run(found)]
        passed_over.append(found)
    weights = [found for found in passed_over if found.model_only]
    if weights and steps is None:
        return weights[0], []
    if weights:
        raise UserError(
            f"{weights[0].path} holds model weights only (checkpoint.last_save_model_only), so "
            "training cannot resume from it, and no older full checkpoint is left. To train on "
            f"from these weights, set checkpoint.initial_load_path = {str(weights[0].path)!r} and "
            "another checkpoint.folder"
        )
    damaged = [found for found in passed_over if found.state == "damaged"]
    if damaged:
        listed = "; ".join(f"{found.path.name}: {found.reason}" for found in damaged[:3])
        raise UserError(
            f"no complete checkpoint is left in {folder} ({listed}). Restore the missing files, or "
            "move the folder away to start from step 0"
        )
    return None, [_passed_over(other, None) for other in passed_over]


def step_folders(folder: Path) -> Iterator[StepFolder]:
    """Every ``step-N`` folder, inspected one at a time, highest step first."""
    for step, path in numbered(folder):
        yield inspect(path, step)


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """The ``step-N`` folders in ``folder``, if there is one, by their numbers, highest first."""
    if not folder.is_dir():
        return []
    steps = [
        (int(match[1]), entry)
        for entry in folder.iterdir()
        if (match := re.fullmatch(r"step-(\d+)", entry.name)) and entry.is_dir()
    ]
    return sorted(steps, reverse=True)


def inspect(path: Path, step: int = 0) -> StepFolder:
    """Look at one folder; ``step`` is only passed on. Never raises for what the folder contains."""
    if not (path / ".metadata").is_file():
        return StepFolder(path, step, "unfinished", "it has no .metadata, which is written last")
    try:
        metadata = read_metadata(path)
        needed = _bytes_needed(metadata)
    except Exception as error:  # unpickling damaged bytes can raise nearly anything
        reason = f"its .metadata cannot be read ({type(error).__name__}: {error})"
        return StepFolder(path, step, "damaged", reason)
    for name, size in sorted(needed.items()):
        file = path / name
        if not file.is_file():
            reason = f"{name}, which .metadata names, is missing"
            return StepFolder(path, step, "damaged", reason)
        if file.stat().st_size < size:
            reason = f"{name} has {file.stat().st_size} bytes, .metadata expects {size}"
            return StepFolder(path, step, "damaged", reason)
    model_only = "train_state" not in metadata.state_dict_metadata
    return StepFolder(path, step, "complete", model_only=model_only)


def make_empty(path: Path) -> Path:
    """An empty step folder to save into. What an earlier run left under that step is removed: it is
    half-written, or that step is trained again. Raises UserError if the folder cannot be made."""
    try:
        if path.exists():
            remove(path)
        path.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"checkpoint folder {path} cannot be made: {error}. Name a writable folder in "
            "job.dump_folder or checkpoint.folder"
        ) from error
    return path


def purge(folder: Path, keep_latest_k: int, just_saved: int, base: int = -1) -> list[int]:
    """Remove old complete steps; return those removed. ``keep_latest_k`` 0 keeps all.

    Kept are the newest k complete steps, the newest one that training can resume from (the newest
    k may be model weights only), and ``just_saved`` and ``base``, the step that a run went back to by
    ``checkpoint.load_step``: neither need be among the newest. Incomplete folders neither count nor
    go. If the step just saved does not read back as complete, nothing is removed.
    """
    if keep_latest_k == 0:
        return []
    complete = [found for found in step_folders(folder) if found.state == "complete"]
    if just_saved not in [found.step for found in complete]:
        logger.warning(f"step-{just_saved} in {folder} is not complete: no older step is removed")
        return []
    kept = {found.step for found in complete[:keep_latest_k]} | {just_saved, base}
    kept |= {found.step for found in [found for found in complete if found.resumable][:1]}
    removed = []
    for found in complete:
        if found.step not in kept:
            try:
                remove(found.path)
            except OSError as error:  # a full disk later is worse than noise now, but not fatal
                logger.warning(f"old checkpoint {found.path} could not be removed: {error}")
            else:
                removed.append(found.step)
    return removed


def remove(path: Path) -> None:
    """Delete a step folder; ``.metadata`` first, so that half of one never looks complete."""
    (path / ".metadata").unlink(missing_ok=True)
    shutil.rmtree(path)


def save_is_due(config: CheckpointConfig, step: int, last_step: bool) -> bool:
    first = step == 1 and config.enable_first_step_checkpoint
    return last_step or first or step % config.interval == 0


def export_is_due(config: CheckpointConfig, step: int, last_step: bool) -> bool:
    at_interval = config.hf_interval > 0 and step % config.hf_interval == 0
    return at_interval or (last_step and config.last_save_in_hf)


def _asked_for(
    folder: Path, config: CheckpointConfig, dump_folder: Path, steps: float | None
) -> tuple[StepFolder, list[str]]:
    step = config.load_step
    found = inspect(folder / f"step-{step}", step)
    others = list(step_folders(folder))
    if found.resumable:
        return found, _what_happens_to_newer(found, config, dump_folder, steps)
    usable = [str(other.step) for other in others if other.resumable]
    if not found.path.is_dir():
        reason = "there is no such folder"
    else:
        reason = found.reason or "it holds model weights only"
    raise UserError(
        f"checkpoint.load_step = {step}: cannot resume from {found.path}: {reason}. "
        f"Steps that can be resumed there: {', '.join(usable) or 'none'}"
    )


def _what_happens_to_newer(
    found: StepFolder, config: CheckpointConfig, dump_folder: Path, steps: float | None
) -> list[str]:
    """Of the steps and exports that an earlier run left beyond the step gone back to, those that this
    run writes again, and the rest."""
    exports = exports_folder(dump_folder)
    replaced, stay = [], []
    for parent, is_due in ((found.path.parent, save_is_due), (exports, export_is_due)):
        for step, path in numbered(parent):
            if step <= found.step:
                continue
            reached = steps is None or step <= steps
            if reached and not config.load_only and is_due(config, step, step == steps):
                replaced.append(str(path))
            else:
                stay.append(str(path))
    notes = []
    if replaced:
        notes.append(
            f"checkpoint.load_step = {found.step}: {', '.join(replaced)} will be replaced when this run "
            "reaches them. To keep both, stop it, and start from this step in another job.dump_folder "
            f"(another checkpoint.folder keeps the steps but not the exports in {exports}): "
            f"checkpoint.initial_load_path = {str(found.path)!r}, initial_load_model_only = false, and "
            "no load_step"
        )
    if stay:
        notes.append(
            f"checkpoint.load_step = {found.step}: {', '.join(stay)} will not be replaced; a later run "
            f"without load_step will continue from the newest step in {found.path.parent}"
        )
    return notes


def _passed_over(other: StepFolder, chosen: StepFolder | None) -> str:
    reason = other.reason or "it holds model weights only"
    instead = f"continuing from {chosen.path.name}" if chosen else "nothing older to continue from"
    return f"checkpoint {other.path} is skipped: {reason}; {instead}"


def _end_of_run(end: StepFolder) -> str:
    older = [found for found in step_folders(end.path.parent) if found.resumable]
    more = "cannot go on from it"
    if older:
        more = f"goes on from {older[0].path.name}, the newest full checkpoint"
    return (
        f"checkpoint {end.path} holds model weights only (checkpoint.last_save_model_only): a run with "
        f"more training.steps {more}"
    )


def _initial(config: CheckpointConfig, notes: list[str], hf_assets_path: str) -> Start:
    if config.initial_load_in_hf:
        folder = config.initial_load_path or hf_assets_path
        if not folder:
            raise UserError(
                "checkpoint.initial_load_in_hf = true, but no folder is named: set "
                "model.hf_assets_path, or checkpoint.initial_load_path if the weights lie elsewhere"
            )
        return Start(Path(folder), model_only=True, in_hf=True, notes=tuple(notes))
    if not config.initial_load_path:
        return Start(notes=(*notes, *_weights_left_unread(hf_assets_path)))
    path = Path(config.initial_load_path)
    found = inspect(path)
    if found.state != "complete":
        reason = found.reason if path.is_dir() else "there is no such folder"
        advice = "Name a step folder itself, such as outputs/checkpoint/step-500"
        if has_weights(path):
            reason, advice = (
                "it is a Hugging Face folder",
                "Set checkpoint.initial_load_in_hf = true to load it",
            )
        raise UserError(
            f"checkpoint.initial_load_path = {str(path)!r} is not a complete checkpoint: {reason}. "
            f"{advice}"
        )
    if found.model_only and not config.initial_load_model_only:
        raise UserError(
            f"checkpoint.initial_load_path = {str(path)!r} holds model weights only: leave "
            "checkpoint.initial_load_model_only at true"
        )
    return Start(path, model_only=config.initial_load_model_only, notes=tuple(notes))


def _weights_left_unread(hf_assets_path: str) -> list[str]:
    if not hf_assets_path or not has_weights(hf_assets_path):
        return []
    return [
        f"model.hf_assets_path = {hf_assets_path} holds weights, but training starts from random ones: "
        "to load them set checkpoint.enable and checkpoint.initial_load_in_hf to true"
    ]


def _bytes_needed(metadata: Metadata) -> dict[str, int]:
    """File name -> the bytes it must have, from where each saved piece is said to end."""
    needed: dict[str, int] = {}
    for piece in metadata.storage_data.values():
        end = piece.offset + piece.length
        needed[piece.relative_path] = max(end, needed.get(piece.relative_path, 0))
    return needed
