"""Copies as late as the waits allow, on a CPU: what a GPU would get wrong now and then, always.

A copy runs when somebody waits for it, behind those of its direction before it; with ``chance`` some run
earlier, at any moment. Until then a tensor on its way back is full of NaN. What a GPU would not notice is
collected in `faults`: memory freed, changed or overwritten under a copy that has still to run.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Direction = Literal["out", "back"]


@dataclass(eq=False)
class Copy:
    """One copy, submitted; it keeps nothing of the device's alive."""

    direction: Direction
    device_side: Callable[[], Tensor | None]
    host: Tensor
    after: Copy | None
    before: Tensor  # what out copies, as it was then
    done: bool = False


class LateCopies:
    def __init__(self, chance: float = 0.0, seed: int = 0) -> None:
        self.faults: list[str] = []
        self.sent: list[int] = []  # bytes of each copy out
        self._chance, self._random = chance, random.Random(seed)
        self._queues: dict[Direction, list[Copy]] = {"out": [], "back": []}
        # By address: what the last copy out that was submitted puts there.
        self._on_host: dict[int, Tensor] = {}

    def out(self, source: Tensor, target: Tensor, after: Any) -> Copy:
        self.sent.append(source.nbytes)
        copy = self._submit("out", source, target, after, source.clone())
        self._on_host[target.data_ptr()] = copy.before
        return copy

    def back(self, source: Tensor, target: Tensor, after: Any) -> Copy:
        if target.is_floating_point():
            target.fill_(float("nan"))
        return self._submit("back", target, source, after, self._on_host[source.data_ptr()])

    def wait(self, copied: Copy) -> None:
        self._run_some()
        self.run(copied)

    def run(self, copy: Copy) -> None:
        """With what is ahead of it, and what it comes after."""
        queue = self._queues[copy.direction]
        while not copy.done:
            first = queue[0]
            if first.after is not None:
                self.run(first.after)
            queue.pop(0)
            self._run(first)
            first.done = True

    @property
    def pending(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def _submit(
        self, direction: Direction, on_device: Tensor, host: Tensor, after: Any, before: Tensor
    ) -> Copy:
        self._run_some()
        if not on_device.is_contiguous():
            self.faults.append(
                f"a copy {direction} of strides: it would be made on the wrong stream"
            )
        copy = Copy(direction, _weakly(on_device), host, after, before)
        weakref.finalize(on_device.untyped_storage(), self._freed, weakref.ref(copy))
        self._queues[direction].append(copy)
        return copy

    def _freed(self, ref: weakref.ref[Copy]) -> None:
        copy = ref()
        if copy is not None and not copy.done:
            self.faults.append(f"memory of a copy {copy.direction} was freed before it ran")

    def _run_some(self) -> None:
        while self.pending and self._random.random() < self._chance:
            self.run(self._random.choice([q[0] for q in self._queues.values() if q]))

    def _run(self, copy: Copy) -> None:
        here = copy.device_side()
        if here is None:
            return  # noted when it was freed
        address = copy.host.data_ptr()
        others = self._queues["back" if copy.direction == "out" else "out"]
        if copy.direction == "out":
            if not _same(here, copy.before):
                self.faults.append("a tensor was changed before its copy out ran")
            if any(o.host.data_ptr() == address and not _same(o.before, here) for o in others):
                self.faults.append("a host buffer was overwritten before its copy back ran")
            copy.host.copy_(here)
        else:
            if not _same(copy.host, copy.before):
                self.faults.append("a host buffer was read before its copy out ran")
            here.copy_(copy.host)


def _weakly(x: Tensor) -> Callable[[], Tensor | None]:
    """Gives ``x`` while something else keeps its memory."""
    storage = weakref.ref(x.untyped_storage())
    empty = x.new_empty(0)
    place = x.storage_offset(), x.shape, x.stride()

    def get() -> Tensor | None:
        alive = storage()
        return None if alive is None else empty.detach().set_(alive, *place)

    return get


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN too."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
