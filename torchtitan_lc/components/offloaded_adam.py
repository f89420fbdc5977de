"""Adam and AdamW whose moments live in host memory, and visit the GPU parameter by parameter.

    upload     | m0 v0 | m1 v1 |       | m2 v2 |        side stream, host -> slot
    compute            | step 0 | step 1 |     ...      current stream, torch's own kernel
    download                    | m0 v0 | m1 v1 | ...   side stream, slot -> host

Two slots on the GPU, each as large as the moments of the largest parameter (its shard, under FSDP2),
allocated for the step alone: in forward and backward the GPU holds no optimizer state. Uploads and
downloads run at the same time, as PCIe and NVLink-C2C are full duplex.

The arithmetic is torch's, called with one parameter at a time. Adam is elementwise, so every bit is
that of torch.optim.AdamW over all parameters at once.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam

from torchtitan_lc.memory.host_memory import HostMemory
from torchtitan_lc.tools.errors import UserError

_MOMENTS = ("exp_avg", "exp_avg_sq")
_ALIGNMENT = 64  # bytes: a cache line, and more than any vector load asks for


class OffloadedAdam(torch.optim.Adam):
    """torch.optim.Adam (AdamW with ``decoupled_weight_decay``) with its moments in host memory.

    ``state`` and ``state_dict()`` have the names, shapes and dtypes of torch's, and DTensors where the
    parameters are; their local tensors lie on the host. So checkpoints go from one to the other. The
    state exists from the start, zero, in one pinned allocation; parameters can't be added later.

    ``step()`` returns when the moments are back, so that whoever reads them finds them whole: the host
    waits for the device once per step.

    Parameters: contiguous, of one device, shards included. On a CPU moments are updated in place.
    Raises UserError where the host memory can't be had.
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        super().__init__(groups, **settings)
        parameters = self._parameters()
        shards = [_local(p.detach()) for p in parameters]
        (self._device,) = {shard.device for shard in shards}
        n_bytes = sum(2 * _aligned(shard.nbytes) for shard in shards)
        self._memory = _pinned(n_bytes, self._device)
        self._regions: dict[nn.Parameter, Tensor] = {}
        offset = 0
        for parameter, shard in zip(parameters, shards, strict=True):
            assert shard.is_contiguous(), "moments would not lie as their parameter does"
            half = _aligned(shard.nbytes)
            self._regions[parameter] = _at(self._memory, offset, (2 * half,), torch.uint8)
            for name in _MOMENTS:
                moment = _at(self._memory, offset, shard.shape, shard.dtype)
                if isinstance(parameter, DTensor):
                    # from_local would move it to the device of the mesh.
                    moment = DTensor(moment, parameter._spec, requires_grad=False)
                self.state[parameter][name] = moment
                offset += half
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = _no_steps(parameter, group)
        self._lanes: Lanes | None = None
        if self._device.type == "cuda":
            self._lanes = StreamLanes(self._device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        visits = [
            Visit(self._regions[parameter], partial(self._update, parameter, group))
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if self._lanes is None:
            for visit in visits:
                visit.update(visit.region)
        else:
            pipeline(visits, self._device, self._lanes)
        return loss

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], region: Tensor) -> None:
        """Torch's step of one parameter, with its moments in ``region`` (on the parameter's device)."""
        assert parameter.grad is not None
        local = _local(parameter)
        exp_avg, exp_avg_sq = _moments(region, local)
        beta1, beta2 = group["betas"]
        adam(
            [local],
            [_local(parameter.grad)],
            [exp_avg],
            [exp_avg_sq],
            [],
            [self.state[parameter]["step"]],
            foreach=group["foreach"],
            fused=group["fused"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Values are copied into the host memory. Torch's own would put every moment on the GPU."""
        saved = state_dict["state"]
        counts = {key: {"step": s["step"]} for key, s in saved.items() if "step" in s}
        held = self.state
        super().load_state_dict({**state_dict, "state": counts})
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        key_of = dict(zip(self._parameters(), keys, strict=True))
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                # A parameter that was never updated has no state in torch's.
                state.setdefault("step", _no_steps(parameter, group))
                loaded = saved.get(key_of[parameter], {})
                for name in _MOMENTS:
                    state[name] = held[parameter][name]
                    if name in loaded:
                        _local(state[name]).copy_(_local(loaded[name]))
                    else:
                        _local(state[name]).zero_()

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


@dataclass(frozen=True)
class Visit:
    """The moments of one parameter, as bytes in host memory; ``update`` is given a copy on the device
    and changes it."""

    region: Tensor
    update: Callable[[Tensor], None]


class Lane(Protocol):
    """What is submitted runs in order, later than now; ``wait`` holds back what is submitted after it."""

    def submit(self, work: Callable[[], Any]) -> None: ...

    def record(self) -> Any: ...

    def wait(self, event: Any) -> None: ...


class Lanes(Protocol):
    @property
    def upload(self) -> Lane: ...

    @property
    def compute(self) -> Lane: ...

    @property
    def download(self) -> Lane: ...


def pipeline(visits: Sequence[Visit], device: torch.device, lanes: Lanes) -> None:
    """Bring each visit's region to ``device``, update it, and bring it back; at most two are there at
    a time. Returns when all are back."""
    n_bytes = max((visit.region.numel() for visit in visits), default=0)
    slots = [torch.empty(n_bytes, dtype=torch.uint8, device=device) for _ in visits[:2]]
    # The memory of the slots may still be read by what the current stream has yet to do.
    slot_free = [lanes.compute.record() for _ in slots]
    for i, visit in enumerate(visits):
        on_device = slots[i % 2][: visit.region.numel()]
        lanes.upload.wait(slot_free[i % 2])
        lanes.upload.submit(partial(on_device.copy_, visit.region, non_blocking=True))
        lanes.compute.wait(lanes.upload.record())
        lanes.compute.submit(partial(visit.update, on_device))
        lanes.download.wait(lanes.compute.record())
        lanes.download.submit(partial(visit.region.copy_, on_device, non_blocking=True))
        slot_free[i % 2] = lanes.download.record()
    for event in slot_free:
        event.synchronize()  # the slots go back to the allocator, and the host may read


class StreamLanes:
    """Two streams of its own beside the one that is current when ``compute`` is asked for."""

    def __init__(self, device: torch.device) -> None:
        self.upload: Lane = _StreamLane(torch.cuda.Stream(device))
        self.download: Lane = _StreamLane(torch.cuda.Stream(device))

    @property
    def compute(self) -> Lane:
        return _StreamLane(torch.cuda.current_stream())


class _StreamLane:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def submit(self, work: Callable[[], Any]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> torch.cuda.Event:
        return self._stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        self._stream.wait_event(event)


def _pinned(n_bytes: int, device: torch.device) -> Tensor:
    """Zeros (uint8) on the host, of exactly that size, page-locked where ``device`` is a GPU."""
    try:
        return HostMemory(device).take(n_bytes).data.zero_()
    except RuntimeError as error:
        raise UserError(
            f"optimizer.offload_state: this rank got no {n_bytes / 2**30:.2f} GiB of page-locked host "
            "memory. Give the job more host memory, or lift its limit of locked memory (ulimit -l, the "
            "container's memory limit)"
        ) from error


def _at(memory: Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor ``offset`` bytes into ``memory``, with a storage of its own that begins there.

    A view would have a storage offset: torch's asynchronous saves copy whole storages, and take a
    DTensor over a local tensor with a storage offset for one that has a storage itself.
    """
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    span = (ctypes.c_byte * (count * dtype.itemsize)).from_address(memory.data_ptr() + offset)
    span.memory = memory  # type: ignore[attr-defined]  # lives as long as the tensor does
    return torch.frombuffer(span, dtype=dtype).view(shape)


def _local(tensor: Tensor) -> Tensor:
    """This rank's share; under no_grad the tensor itself and not a view of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


def _moments(region: Tensor, like: Tensor) -> list[Tensor]:
    """First and second moment, each of ``like``'s shape and dtype, in a region of bytes."""
    return [half[: like.nbytes].view(like.dtype).view(like.shape) for half in region.chunk(2)]


def _no_steps(parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """Where torch keeps the count: on the device for the fused kernel, else on the host."""
    device = parameter.device if group["fused"] else "cpu"
    return torch.zeros((), dtype=torch.float32, device=device)
