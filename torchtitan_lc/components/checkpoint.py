"""Save and resume a run: DCP folders ``dump_folder/folder/step-N``, readable at any world size.

What lies in a folder, by key:

    model.<name>                 one tensor per parameter, every rank its own shard
    optimizer.state.<name>.<x>   Adam moments and step, sharded like their parameter
    lr_scheduler, train_state, dataloader   small values, equal on all ranks
    dataloader.lane<i>           loader position of lane i, equal on the ranks that share its rows
    rng.rank<r>                  random generators of rank r
    identity                     name, flavor, ...: for messages only

Values that differ between ranks must lie under different keys: DCP keeps one copy of equal keys
without a word, and all ranks would resume at rank 0's position. A rank loads the lanes its loader
has, wherever they were saved from, so the data order survives another world size.

Hyperparameters are not loaded: learning rate, betas and weight decay come from the config of the
run that resumes. So an edit of the config takes effect, and the rate is a function of the step.

A run that starts from Hugging Face weights reads them once, into step 0; its own steps are folders as
above. What it gives back to Hugging Face lies in ``dump_folder/hf/step-N`` (hf_export.py).

Which folder is loaded is decided by global rank 0 and told to the others, errors included: two
ranks can neither start from different steps nor wait for one that gave up.
"""

from __future__ import annotations

import copy
import math
import time
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR

from torchtitan_lc.components import checkpoint_folders as folders
from torchtitan_lc.components import checkpoint_reading as reading
from torchtitan_lc.components import checkpoint_writing as writing
from torchtitan_lc.components import hf_folder
from torchtitan_lc.components.agreement import all_or_none, from_rank_zero
from torchtitan_lc.components.checkpoint_identity import differing
from torchtitan_lc.components.hf_export import Exporter
from torchtitan_lc.components.hf_folder import HuggingFaceForm
from torchtitan_lc.components.lr_scheduler import continue_at
from torchtitan_lc.components.rng import rng_state, set_rng_state
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.logging import logger

if TYPE_CHECKING:
    from torchtitan_lc.config.job_config import Checkpoint as CheckpointConfig

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
# Terabytes to a slow file system take longer than the time limit of a training step.
_SAVE_TIMEOUT = timedelta(hours=1)


class HasState(Protocol):
    """Plain values in, plain values out: ints, strings, and dicts of them."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class CheckpointManager:
    """Build it on every rank (it makes a process group), after sharding and ``build_optimizer``.

    train_state:  its state has at least "step": int, the updates completed.
    dataloader:   its state is {"num_lanes": int, "fingerprint": ..., "lanes": {"lane<i>": {...}}}
                  with the lanes of this data-parallel rank only.
    model_identity:  name, flavor and what else tells a person which model wrote a checkpoint.
    hf:  the model's form at Hugging Face; None if it has none, and the config asks for none.

    Works without a process group, too, as one process.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        dump_folder: str | Path,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: LambdaLR,
        train_state: HasState,
        dataloader: HasState,
        model_identity: dict[str, Any],
        hf: HuggingFaceForm | None = None,
    ) -> None:
        self.config = config
        self.dump_folder = dump_folder
        self.folder = folders.checkpoint_folder(config, dump_folder)
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.train_state = train_state
        self.dataloader = dataloader
        self.model_identity = model_identity
        self.hf = hf
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        # A group of its own: an async save talks from another thread while training talks in the
        # default group, and two threads in one group mix up whose message is whose.
        self._group: dist.ProcessGroup | None = None
        if config.enable and dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=_SAVE_TIMEOUT)
        self._in_flight: tuple[int, Future[Any], float] | None = None
        self._loaded: Path | None = None
        self._exporter = self._build_exporter()

    # ---- load ----------------------------------------------------------------------------------

    def load(self, steps: float = math.inf) -> int:
        """Load what the config and the folder ask for; return the number of completed steps, or 0.

        steps: training.steps. Weights alone of that step or a later one are the end of the run: their
        step is returned, and nothing is read. Collective. Raises UserError, the same on every rank, and
        has then written nothing.
        """
        assets = str(self.hf.assets) if self.hf and self.hf.assets else ""

        def choose() -> folders.Start:
            return folders.choose_start(self.config, self.dump_folder, assets, steps)

        start = from_rank_zero(choose, self._group)
        for note in start.notes if self._rank == 0 else ():
            logger.warning(note)
        if start.path is None:
            return 0
        if start.in_hf:
            self._load_hf(start.path)
            return 0
        began = time.perf_counter()
        path = start.path
        parts: list[str] = ["model"] if start.model_only else list(folders.PARTS)
        parts = [part for part in parts if part not in self.config.exclude_from_loading]
        tensors = self._tensors(parts)
        from_rank_zero(lambda: self._check_fits(path, parts, tensors), self._group)
        self._loaded = path
        if start.finished is not None:
            return start.finished
        state = tensors | dict.fromkeys(self._plain_keys(path, parts))
        reading.read_into(state, path, self._group)
        self._apply(parts, state)
        step = int(self.train_state.state_dict()["step"])
        if self._rank == 0:
            what = "all of it" if len(parts) == len(folders.PARTS) else ", ".join(parts)
            seconds = time.perf_counter() - began
            logger.info(f"Loaded checkpoint {path} ({what}) in {seconds:.2f} s; step is {step}")
        return step

    def _load_hf(self, path: Path) -> None:
        """Fill the weights from a Hugging Face folder: each rank reads its own part of each tensor."""
        if "model" in self.config.exclude_from_loading:
            return
        assert self.hf is not None, "preflight refuses models without a Hugging Face form"
        began = time.perf_counter()
        name = self.hf.name
        tensors = self._tensors(["model"])
        state = {name(ours.removeprefix("model.")): tensor for ours, tensor in tensors.items()}
        shapes = {theirs: tuple(tensor.shape) for theirs, tensor in state.items()}

        def check() -> None:
            problem = hf_folder.misfit(path, shapes) or hf_folder.tied_copy_differs(path, shapes)
            if problem:
                raise UserError(problem)

        from_rank_zero(check, self._group)
        reader, problem = None, None
        try:
            reader = hf_folder.SafetensorsReader(path)
        except UserError as error:  # of a node that has not the folder that rank 0 has
            problem = str(error)
        all_or_none(problem, self._group)
        reading.read_into(state, path, self._group, reader=reader, advice="Download it again")
        self._apply(["model"], tensors)
        if self._rank == 0:
            seconds = time.perf_counter() - began
            logger.info(f"Loaded Hugging Face weights {path} in {seconds:.2f} s; step is 0")

    def _check_fits(self, path: Path, parts: list[str], wanted: dict[str, Any]) -> None:
        """Compare names and shapes with the checkpoint's description alone; no tensor is read."""
        shapes = {key: tuple(value.shape) for key, value in wanted.items()}
        parts = [part for part in parts if part in ("model", "optimizer")]
        problem = reading.misfit(path, parts, shapes, self.model_identity)
        if problem:
            raise UserError(problem)
        theirs = reading.read_identity(path)
        lines = differing(theirs, self.model_identity)
        if not theirs:
            logger.warning(f"checkpoint {path} has the right shapes but does not say whose it is")
        elif lines:
            logger.warning(
                f"checkpoint {path} has the right shapes but was saved by another model (saved -> this "
                f"run's); where that is not meant, set it as it was: {'; '.join(lines)}"
            )

    def _plain_keys(self, path: Path, parts: list[str]) -> list[str]:
        """The small values that this rank reads: DCP fills the keys it is given, so ask first."""
        saved = reading.read_metadata(path).state_dict_metadata
        keys = [part for part in parts if part in ("lr_scheduler", "train_state", "dataloader")]
        if "dataloader" in parts:
            # A lane that was not saved is for the loader to refuse: it knows why it has the lane.
            lanes = [f"dataloader.{lane}" for lane in self.dataloader.state_dict()["lanes"]]
            keys += [lane for lane in lanes if lane in saved]
        if "rng" in parts:
            generators = f"rng.rank{self._rank}"
            if generators in saved:
                keys.append(generators)
            else:
                logger.info(f"{path} has no random state of rank {self._rank}: it keeps its seed")
        return keys

    def _apply(self, parts: list[str], state: dict[str, Any]) -> None:
        """Hand the values to their owners; tensors were filled in place already."""
        if "model" in parts:
            set_model_state_dict(self.model, _strip("model.", state))
        if "optimizer" in parts:
            current = get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT)
            loaded = cast(Any, current | _strip("optimizer.", state))
            set_optimizer_state_dict(self.model, self.optimizer, loaded, options=_FLAT)
        if "lr_scheduler" in parts:
            continue_at(self.lr_scheduler, state["lr_scheduler"]["last_epoch"])
        if "train_state" in parts:
            self.train_state.load_state_dict(state["train_state"])
        if "dataloader" in parts:
            problem = None
            try:
                lanes = _strip("dataloader.", state)
                self.dataloader.load_state_dict({**state["dataloader"], "lanes": lanes})
            except (UserError, ValueError) as error:
                problem = str(error)
            all_or_none(problem, self._group)
        if f"rng.rank{self._rank}" in state:
            set_rng_state(state[f"rng.rank{self._rank}"])

    # ---- save ----------------------------------------------------------------------------------

    def save(self, step: int, *, last_step: bool = False) -> bool:
        """Save if ``step`` (completed updates) is due; return whether it was. Collective.

        Exports for Hugging Face, by ``hf_interval`` and ``last_save_in_hf``, are made here too.

        Due: the last step always, every ``interval``, and step 1 with
        ``enable_first_step_checkpoint``. With async_mode "async" the call returns when everything
        is copied to host memory, and what is saved is what was true at the call. One save is in
        flight at a time: the next one waits for it and raises what it met. The last step is saved
        before returning.

        Raises UserError when the files cannot be written; older checkpoints are then untouched.
        """
        config = self.config
        if not config.enable or config.load_only:
            return False
        is_due = folders.save_is_due(config, step, last_step)
        if is_due:
            self._save_step(step, last_step)
        if self._exporter is not None and folders.export_is_due(config, step, last_step):
            weights = _strip("model.", self._tensors(["model"]))
            self._exporter.start(step, weights)
            if last_step:
                self._exporter.wait()
        return is_due

    def save_out_of_turn(self, step: int) -> None:
        """Save ``step`` where it was not due, before a run ends early. Collective; raises as `save` does."""
        config = self.config
        if config.enable and not config.load_only and not folders.save_is_due(config, step, False):
            self._save_step(step, last_step=False)
        self.wait()

    def export_if_missing(self, step: int) -> None:
        """Make up for an export that a finished run owes: it was killed after it saved ``step``, the
        last one, or the export was asked for later. Collective, after `load`.
        """
        source, exporter = self._loaded, self._exporter
        if source is None or exporter is None or not folders.export_is_due(self.config, step, True):
            return
        if from_rank_zero(lambda: exporter.has(step, source), self._group):
            return
        if self._rank == 0:
            logger.info(
                f"{source} has no whole Hugging Face export as new as itself: making it now"
            )
        # Read also what `load` has read: it may have been told to leave the model out.
        tensors = self._tensors(["model"])
        reading.read_into(tensors, source, self._group)
        self._apply(["model"], tensors)
        exporter.start(step, _strip("model.", tensors))
        exporter.wait()

    def _save_step(self, step: int, last_step: bool) -> None:
        config = self.config
        self._wait_for_step()
        state = self._model_only() if last_step and config.last_save_model_only else self._full()
        path = from_rank_zero(lambda: folders.make_empty(self._path(step)), self._group)
        began = time.perf_counter()
        if config.async_mode == "async" and not last_step:
            self._in_flight = (step, writing.start(state, path, self._group), began)
            return
        writing.write(state, path, self._group)
        self._finished(step, began)

    def wait(self) -> None:
        """Wait for the save and the export in flight, if any; raises what they met. Collective."""
        self._wait_for_step()
        if self._exporter is not None:
            self._exporter.wait()

    def _wait_for_step(self) -> None:
        if self._in_flight is None:
            return
        step, future, began = self._in_flight
        self._in_flight = None
        writing.wait(future, self._path(step))
        self._finished(step, began)

    def close(self) -> None:
        """Let what is in flight finish its files. Call it before the process group is destroyed.

        A run that ends well has called `wait`; so this is for one that failed, maybe on this rank
        alone. No other rank is asked for anything, no old step is removed, and what the save met is
        logged: raised, it would take the place of the error that ended the run.
        """
        if self._exporter is not None:
            self._exporter.close()
        if self._in_flight is None:
            return
        step, future, _ = self._in_flight
        self._in_flight = None
        error = future.exception()
        if error is not None:
            error = writing.explained(error, self._path(step))
            logger.error(f"The save of step {step} failed too: {error}")

    def _build_exporter(self) -> Exporter | None:
        config = self.config
        wanted = config.last_save_in_hf or config.hf_interval > 0
        if not wanted or not config.enable or config.load_only:
            return None
        assert self.hf is not None, "preflight refuses models without a Hugging Face form"
        group = None
        if dist.is_initialized():
            group = dist.new_group(backend="gloo", timeout=_SAVE_TIMEOUT)
        folder = folders.exports_folder(self.dump_folder)
        return Exporter(folder, self.hf, _strip("model.", self._tensors(["model"])), group)

    def _full(self) -> dict[str, Any]:
        # Copies of plain values: whether async staging makes its own is torch's to change.
        loader = copy.deepcopy(self.dataloader.state_dict())
        lanes = loader.pop("lanes")
        return {
            **self._tensors(["model", "optimizer"]),
            "identity": copy.deepcopy(self.model_identity),
            "lr_scheduler": {"last_epoch": self.lr_scheduler.last_epoch},
            "train_state": copy.deepcopy(self.train_state.state_dict()),
            "dataloader": loader,
            **{f"dataloader.{lane}": position for lane, position in lanes.items()},
            f"rng.rank{self._rank}": rng_state(),
        }

    def _model_only(self) -> dict[str, Any]:
        dtype = getattr(torch, self.config.export_dtype)
        weights = self._tensors(["model"])
        exported = {k: v.to(dtype) if v.is_floating_point() else v for k, v in weights.items()}
        return exported | {"identity": copy.deepcopy(self.model_identity)}

    def _tensors(self, parts: list[str]) -> dict[str, Any]:
        """The tensors themselves, not copies: loading fills them in place."""
        state: dict[str, Any] = {}
        if "model" in parts:
            state |= {f"model.{k}": v for k, v in get_model_state_dict(self.model).items()}
        if "optimizer" in parts:
            flat = get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT)
            state |= {f"optimizer.{k}": v for k, v in flat.items() if k.startswith("state.")}
        return state

    def _finished(self, step: int, began: float) -> None:
        if self._rank == 0:
            seconds = time.perf_counter() - began
            logger.info(f"Saved checkpoint {self._path(step)} in {seconds:.2f} s")
        # All ranks wait here: a slow file system may take longer to delete terabytes than the time
        # limit of the training step in which the others would wait for rank 0.
        keep = self.config.keep_latest_k
        removed = from_rank_zero(
            lambda: folders.purge(self.folder, keep, step, self.config.load_step), self._group
        )
        if removed and self._rank == 0:
            logger.info(f"Removed old checkpoints: steps {', '.join(map(str, sorted(removed)))}")

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step}"


def _strip(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
