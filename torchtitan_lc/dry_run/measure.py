"""Run the steps and write down bytes and seconds; where memory runs out, how far it got."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lc.distributed.fake_ranks import fake_ranks
from torchtitan_lc.distributed.reduce import clip_gradients
from torchtitan_lc.distributed.setup import seed_everything
from torchtitan_lc.dry_run.job import DryJob
from torchtitan_lc.dry_run.memory import CountedBytes, CudaBytes, DeviceBytes, at_most
from torchtitan_lc.dry_run.rank import Context, Fill, Rank
from torchtitan_lc.memory.host_use import HostUse
from torchtitan_lc.models.decoder.model import Decoder


@dataclass
class Measured:
    """figures: bytes by name, as compare.py plans them; "step" is in seconds. at: what ran last. error: why
    no more did; None where all steps ran."""

    figures: dict[str, float] = field(default_factory=dict)
    at: str = "building the model"
    error: str | None = None


def measure(job: DryJob) -> Measured:
    """All of it; out of memory is a result, other errors are raised."""
    measured = Measured()
    with ExitStack() as stack:
        memory: DeviceBytes
        stepping: Context = contextlib.nullcontext
        mode: AbstractContextManager[Any] | None = None
        host = HostUse()
        on_gpu = job.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(job.device)
            memory = CudaBytes(job.device)
            stack.enter_context(at_most(job.limit, job.device))
            stack.enter_context(host.counting())
        else:
            memory = counted = CountedBytes(job.limit)
            mode = _fake_mode() if job.fake else None
            stepping = _counting(counted, mode)
            stack.enter_context(host.counting(counted.elsewhere))
        config = copy.copy(job.config)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        config.job = copy.copy(config.job)
        config.job.dump_folder = folder
        stack.enter_context(fake_ranks(job.plan.job.world, job.device))
        seed_everything(config.debug.seed, config.debug.deterministic)
        memory.restart()
        try:
            rank = Rank(
                config,
                job.device,
                job.kernel.kernel,
                stepping=stepping,
                arrived=memory.hold,
                fill=None if mode is None else _filled_by(mode),
            )
            try:
                _built(rank, job, memory, measured)
                if job.update_first:
                    with mode or contextlib.nullcontext():
                        _update_alone(rank)
                _steps(rank, job, memory, host, measured)
            finally:
                rank.close()
        except torch.OutOfMemoryError as error:
            measured.error = str(error).partition("\n")[0]
        finally:
            if memory.reserved is not None:
                measured.figures["peak reserved"] = memory.reserved
    return measured


def _fake_mode() -> AbstractContextManager[Any]:
    # Only now: it takes a second to import.
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)  # batches and counters are real


def _counting(counted: CountedBytes, mode: AbstractContextManager[Any] | None) -> Context:
    @contextmanager
    def stepping() -> Iterator[None]:
        with warnings.catch_warnings(), mode or contextlib.nullcontext():
            # Offload tells a block's input by its address, shape and dtype; without one by the rest.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            with counted, counted.resizing():
                yield

    return stepping


def _filled_by(mode: AbstractContextManager[Any]) -> Fill:
    """Shards without memory have no first values either."""

    def fill(module: nn.Module) -> None:
        with mode:
            module.to_empty(device="cpu")

    return fill


def _update_alone(rank: Rank) -> None:
    """In place of the first step: optimizer state is made, and DTensor works out the shapes of whole
    parameters, once and for all, while nobody counts what it takes for that."""
    parameters = list(rank.module.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    clip_gradients(parameters, rank.config.training.max_norm)
    rank.optimizer.step()
    rank.optimizer.zero_grad(set_to_none=True)


def _built(rank: Rank, job: DryJob, memory: DeviceBytes, measured: Measured) -> None:
    """Before the optimizer has any state."""
    parameters = [_local(p) for p in rank.module.parameters()]
    memory.hold(parameters)
    measured.figures["allocated after building"] = memory.now
    _state(measured.figures, "parameters", parameters, job.device)


def _steps(rank: Rank, job: DryJob, memory: DeviceBytes, host: HostUse, measured: Measured) -> None:
    figures = measured.figures
    memory.hold(_moments(rank.optimizer))
    page_locked = host.now  # of the optimizer
    host.peak = host.now
    watch = Watch(rank, memory, measured)
    with rank.metrics(0) as metrics:
        for step in range(2 if job.update_first else 1, job.config.dry_run.steps + 1):
            watch.begin(step)
            began = _now(job.device)
            rank.train_step(metrics)
            seconds = _now(job.device) - began
            watch.finish()
            _state(figures, "Adam moments", _moments(rank.optimizer), job.device)
            figures["allocated between steps"] = memory.now
    for phase, peak in watch.peaks.items():
        figures[f"peak, {phase}"] = peak
    figures["peak allocated"] = max(watch.peaks.values())
    figures["host: offloaded activations"] = host.peak - page_locked
    if job.device.type == "cuda":
        figures["step"] = seconds
    measured.at = "the last step"


class Watch:
    """Which part of a step runs, and the most that was allocated in each of its phases."""

    def __init__(self, rank: Rank, memory: DeviceBytes, measured: Measured) -> None:
        self._memory, self._measured = memory, measured
        self._device = rank.device
        self._step, self._phase = 0, ""
        self.peaks: dict[str, int] = {}
        model = cast(Decoder, rank.module)
        model.register_forward_pre_hook(lambda *_: self._enter("forward"))
        model.register_forward_hook(lambda *_: self._enter("backward"))
        self._layers = len(model.blocks)
        for number, block in enumerate(model.blocks, 1):
            self._follow(block, number)
        rank.optimizer.register_step_pre_hook(self._before_update)

    def begin(self, step: int) -> None:
        self._step, self.peaks = step, {}
        self._at("reading the rows")

    def finish(self) -> None:
        self._enter("")

    def _follow(self, block: nn.Module, number: int) -> None:
        of = f"of layer {number} of {self._layers}"

        def before(*_: Any) -> None:
            self._at(f"{self._phase} {of}" if self._phase == "forward" else f"again forward {of}")

        def after(_block: nn.Module, _inputs: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: self._at(f"backward {of}"))

        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._enter("optimizer")
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        locals_ = [_local(grad) for grad in gradients if grad is not None]
        _state(self._measured.figures, "gradients", locals_, self._device)

    def _enter(self, phase: str) -> None:
        """Micro-batches run forward and backward again: the fullest counts."""
        if self._phase:
            peak = max(self.peaks.get(self._phase, 0), self._memory.peak)
            self.peaks[self._phase] = peak
        self._memory.restart()
        self._phase = phase
        self._at(phase)

    def _at(self, what: str) -> None:
        self._measured.at = f"step {self._step}, {what}"


def _state(
    figures: dict[str, float], name: str, tensors: Iterable[Tensor], device: torch.device
) -> None:
    here, host = 0, 0
    for x in tensors:
        if x.device.type == device.type:
            here += x.nbytes
        else:
            host += x.nbytes
    figures[name], figures[f"host: {name}"] = here, host


def _moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Without the counts of steps, which are numbers."""
    values = [x for state in optimizer.state.values() for x in state.values()]
    return [_local(x) for x in values if isinstance(x, Tensor) and x.dim()]


def _local(x: Tensor) -> Tensor:
    """Also inside autograd's graph: a parameter's shard, and not a view of it that would be recorded."""
    return x._local_tensor if isinstance(x, DTensor) else x


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
