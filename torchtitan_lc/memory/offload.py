"""Activations in host memory from forward to backward: block inputs, and attention's (out, lse).

    forward    block i     copy h to the host while the block runs; out of each stage as it is made
    backward   block i+1   ... last stage | h of block i comes back while the norm goes backward
               block i     out of each stage comes back after the kernel of the stage before

Copies run on two streams of their own, one for each direction, and nothing waits on the host. Order is
kept by events alone:
- a copy out starts after the kernels that made the tensor; the tensor is let go only behind it;
- a copy in writes to memory that the compute stream allocated, so it starts after what that stream had
  queued then, and the compute stream waits for it before the first use;
- a host buffer is read after its copy out and overwritten after its copy in.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from torchtitan_lc.memory.checkpointing import LayerStore
from torchtitan_lc.memory.host_memory import HostBuffer, HostMemory
from torchtitan_lc.memory.placement import LayerPlacement
from torchtitan_lc.ops.recompute import DeviceStore, Stored


class Copies(Protocol):
    """Copies beside the computation. What `out` and `back` return is waited for by `wait`."""

    def out(self, source: Tensor, target: Tensor, after: Any) -> Any:
        """Copy to the host once the current stream has made ``source``, and ``after`` has happened."""

    def back(self, source: Tensor, target: Tensor, after: Any) -> Any:
        """Copy to the device once the current stream is done with the memory of ``target``, and
        ``after`` has happened."""

    def wait(self, copied: Any) -> None:
        """Have the current stream wait."""


class CudaCopies:
    """On a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def out(self, source: Tensor, target: Tensor, after: Any) -> Any:
        return self._copy(self._out, source, target, after)

    def back(self, source: Tensor, target: Tensor, after: Any) -> Any:
        return self._copy(self._back, source, target, after)

    def wait(self, copied: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(copied)

    def _copy(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor, after: Any) -> Any:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()


class HostCopies:
    """Where the device is the host: at once."""

    def out(self, source: Tensor, target: Tensor, after: Any) -> Any:
        target.copy_(source)

    def back(self, source: Tensor, target: Tensor, after: Any) -> Any:
        target.copy_(source)

    def wait(self, copied: Any) -> None:
        pass


class Parked:
    """A tensor on its way to host memory, there, or on its way back."""

    def __init__(self, x: Tensor, copies: Copies, memory: HostMemory) -> None:
        self._copies, self._memory = copies, memory
        self._shape, self._dtype, self._device = x.shape, x.dtype, x.device
        self._buffer = buffer = memory.take(x.numel() * x.element_size())
        self._there = buffer.free_after = copies.out(x, self._on_host(), buffer.free_after)
        self._on_device: Tensor | None = x
        self._copied = self._there  # the copy that reads or writes _on_device
        # Where a graph is thrown away, and not at the end of the process.
        self._dropped = weakref.finalize(self, _drop, copies, memory, buffer)
        self._dropped.atexit = False

    def fetch(self) -> None:
        if self._on_device is None:
            x = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._copied = self._copies.back(self._on_host(), x, self._there)
            self._buffer.free_after = self._copied
            self._on_device = x

    def get(self) -> Tensor:
        self.fetch()
        assert self._on_device is not None
        if self._copied is not self._there:  # a copy out only reads it
            self._copies.wait(self._copied)
        return self._on_device

    def leave(self) -> None:
        if self._on_device is not None:
            self._copies.wait(self._copied)
            self._on_device = None

    def take(self) -> Tensor:
        x = self.get()
        self._copies.wait(self._copied)  # also for a copy out: nothing else keeps x for it
        self._on_device = None
        if self._dropped.detach():
            self._memory.give(self._buffer)
        return x

    def _on_host(self) -> Tensor:
        return self._buffer.data.view(self._dtype).view(self._shape)


def _drop(copies: Copies, memory: HostMemory, buffer: HostBuffer) -> None:
    """Runs right before the tensor is let go: behind the copy that is under way, if any."""
    copies.wait(buffer.free_after)
    memory.give(buffer)


class Offload:
    """Host memory and copies of one rank.

    early: fetch before the kernel that runs until then, not after it, and keep what has come: hides
    all copies, for about two hidden-state buffers at the peak.
    """

    def __init__(self, memory: HostMemory, copies: Copies, *, early: bool = False) -> None:
        self.memory, self.copies, self.early = memory, copies, early
        self._blocks: list[weakref.ref[HostStore]] = []  # in the order of forward
        self._leaving: list[Stored] = []

    def block_store(self, placement: LayerPlacement, segment: LayerStore | None) -> HostStore:
        """What one block keeps; ``segment`` keeps its input, if it is not its own."""
        store = HostStore(self, placement, segment if isinstance(segment, HostStore) else None)
        self._blocks = [ref for ref in self._blocks if ref() is not None]
        self._blocks.append(weakref.ref(store))
        return store

    def segment_store(self, placement: LayerPlacement) -> HostStore:
        """What several blocks together keep: their input."""
        return HostStore(self, placement, None)

    def park(self, x: Tensor) -> Parked:
        return Parked(x.contiguous(), self.copies, self.memory)

    def let_go(self, tensors: Sequence[Stored]) -> None:
        """Off the device when the next block begins: until then their copies are under way."""
        self._leaving += tensors

    def settle(self) -> None:
        while self._leaving:
            self._leaving.pop().leave()

    def before(self, store: HostStore) -> HostStore | None:
        """The block that backward comes to after that of ``store``."""
        alive = [block for ref in self._blocks if (block := ref()) is not None]
        place = alive.index(store)
        return alive[place - 1] if place else None


class HostStore:
    """What one block keeps, by its placement."""

    def __init__(
        self, offload: Offload, placement: LayerPlacement, segment: HostStore | None
    ) -> None:
        self.early = offload.early
        self._offload, self._placement, self._segment = offload, placement, segment
        self._on_device = DeviceStore()
        self._input: Parked | None = None  # until backward has it
        self._outputs: list[weakref.ref[Parked]] = []

    def put(self, x: Tensor) -> Stored:
        if not self._placement.outputs_on_host:
            return self._on_device.put(x)
        parked = self._offload.park(x)
        self._outputs.append(weakref.ref(parked))
        return parked

    def let_go(self, tensors: Sequence[Stored]) -> None:
        self._offload.let_go(tensors)

    def settle(self) -> None:
        self._offload.settle()

    def keeping_input(self, h: Tensor) -> AbstractContextManager[Any]:
        """Among what a checkpoint saves, only ``h`` itself goes: no positions, nobody's weights."""

        itself = _identity(h)  # and not h: the hooks live as long as the graph

        def pack(x: Tensor) -> Any:
            if not self._placement.input_on_host or _identity(x) != itself:
                return x
            self._input = self._offload.park(x)
            self._offload.let_go([self._input])
            return self._input

        def unpack(kept: Any) -> Any:
            if not isinstance(kept, Parked):
                return kept
            x = kept.get()
            kept.leave()  # a second pass through the graph fetches it again
            self._input = None
            return x

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def fetch_ahead(self) -> None:
        block = self._offload.before(self)
        if block is not None:
            block.fetch()

    def fetch(self) -> None:
        """What backward reads first of this block: its input, and early also all outputs."""
        kept = (self._segment or self)._input
        if kept is not None:
            kept.fetch()
        for ref in self._outputs if self.early else ():
            parked = ref()
            if parked is not None:
                parked.fetch()


def _identity(x: Tensor) -> tuple[int, torch.Size, torch.dtype]:
    return x.data_ptr(), x.shape, x.dtype
