"""Activation checkpointing of a block: what is kept for backward, what is computed again.

    mode        kept per block                    attention cost, in forward passes of its kernel
    none        block input, out, lse, h1         1 + 2.5
    selective   block input, out, lse             1 + 2.5       same numbers, bit for bit
    full        block input                       1 + 1 + 2.5

Selective records and replays (ops/recompute.py): the first forward leaves (out, lse) on a tape, the
recomputation takes them back instead of running the kernel again. At long context attention is nearly
all of the time, so that is the one large lever. What is kept may lie in host memory (offload.py).

With block_inputs_every = n only every n-th block input is kept, and those between are made again from
it when backward comes there: one checkpoint around n blocks, with one around each of them.

Built on torch's non-reentrant checkpoint, inside the FSDP unit: the gathered weights are there when
backward recomputes the block.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchtitan_lc.ops.recompute import DeviceStore, Phase, Store, Tape, running

Mode = Literal["none", "full", "selective"]


class LayerStore(Store, Protocol):
    """Where one block's kept tensors lie, its input among them."""

    def settle(self) -> None:
        """A block begins: what was let go before it leaves the device."""

    def keeping_input(self, h: Tensor) -> AbstractContextManager[Any]:
        """Context in which autograd saves ``h`` as this store keeps it."""


class Device(DeviceStore):
    def settle(self) -> None:
        pass

    def keeping_input(self, h: Tensor) -> AbstractContextManager[Any]:
        return nullcontext()


def layer_modes(mode: Mode, selective_layers: int, n_layers: int) -> list[Mode]:
    """The mode of each layer: under "selective" the last ``selective_layers`` keep attention's output
    and the others are "full".

    Raises ValueError for a number of layers that the model does not have.
    """
    if mode != "selective":
        return [mode] * n_layers
    if not 0 <= selective_layers <= n_layers:
        raise ValueError(
            f"activation_checkpoint.selective_layers = {selective_layers}: this model has {n_layers} "
            f'layers, so say a number from 0 to {n_layers}, or "auto"'
        )
    full: list[Mode] = ["full"] * (n_layers - selective_layers)
    return full + ["selective"] * selective_layers


@dataclass
class _Segment:
    """Of blocks that are checkpointed together: what keeps their input, their tapes in order, and which
    run of them it is."""

    store: LayerStore
    again: bool = False
    tapes: list[Tape] = field(default_factory=list)
    next: int = 0

    def next_tape(self, new_tape: Callable[[], Tape]) -> Tape:
        if self.next:  # not at the first block: the segment's input has only begun to leave
            self.store.settle()
        if not self.again:
            self.tapes.append(new_tape())
        self.next += 1
        return self.tapes[self.next - 1]


_segment: ContextVar[_Segment | None] = ContextVar("checkpointed_segment", default=None)


class _InSegment(AbstractContextManager[None]):
    def __init__(self, segment: _Segment, again: bool) -> None:
        self._segment, self._again = segment, again
        self._tokens: list[Any] = []

    def __enter__(self) -> None:
        self._segment.again, self._segment.next = self._again, 0
        self._tokens.append(_segment.set(self._segment))

    def __exit__(self, *exception: object) -> None:
        _segment.reset(self._tokens.pop())


Run = Callable[..., Tensor]


def _device_store(segment: LayerStore | None = None) -> LayerStore:
    return Device()


def checkpoint_block(
    mode: Mode, new_store: Callable[[LayerStore | None], LayerStore] = _device_store
) -> Run:
    """A function ``run(fn, h, *others)`` that runs a block's ``fn(h, *others)`` under ``mode``.

    new_store: makes, for each run forward, the place of what is kept: on the device if not said. It is
    given the store of the segment that the block is part of, if it is.
    """
    if mode == "none":
        return _run_plainly

    def new_tape(segment: LayerStore | None) -> tuple[Tape, LayerStore]:
        store = new_store(segment)
        return Tape(mode == "selective", store), store

    def run(fn: Callable[..., Tensor], h: Tensor, *others: Any) -> Tensor:
        segment = _segment.get()
        if segment is not None:
            # Its input belongs to the checkpoint around it.
            tape = segment.next_tape(lambda: new_tape(segment.store)[0])
            return _checkpoint_tape(tape, "again" if segment.again else "forward", fn, h, *others)
        tape, store = new_tape(None)
        store.settle()
        with store.keeping_input(h):
            return _checkpoint_tape(tape, "forward", fn, h, *others)

    return run


def checkpoint_segment(new_store: Callable[[], LayerStore] = _device_store) -> Run:
    """A function ``run(fn, h, *others)`` around blocks that `checkpoint_block` runs, under "full" or
    "selective": of their inputs only ``h`` is kept."""

    def run(fn: Callable[..., Tensor], h: Tensor, *others: Any) -> Tensor:
        segment = _Segment(new_store())
        segment.store.settle()
        with segment.store.keeping_input(h):
            contexts = _InSegment(segment, again=False), _InSegment(segment, again=True)
            return _checkpoint(fn, contexts, h, *others)

    return run


def _checkpoint_tape(tape: Tape, phase: Phase, fn: Callable[..., Tensor], *inputs: Any) -> Tensor:
    return _checkpoint(fn, (running(tape, phase), running(tape, "replay")), *inputs)


def _checkpoint(fn: Callable[..., Tensor], contexts: tuple[Any, Any], *inputs: Any) -> Tensor:
    # No block draws random numbers, so no generator state has to be kept or restored.
    return checkpoint(
        fn,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: contexts,
    )


def _run_plainly(fn: Callable[..., Tensor], *inputs: Any) -> Tensor:
    return fn(*inputs)
