"""What a checkpointed block hands from its forward to its recomputation.

A block under activation checkpointing runs up to three times, and its operations ask here which time
it is:

    forward   the first time. Attention's results are kept if the block's tape says so (selective).
    again     when one of the blocks after it, checkpointed together with it, needs its output. They are
              taken from the tape, or computed and kept, so that attention does not run a third time.
    replay    right before its own backward. They are taken, or computed, and belong to backward now.
              The last operation need not produce its output, because nobody reads it.

The state is a context variable: backward runs on a thread of autograd's own, and enters the context
there. Recomputation only refills the tensors that the first graph saved, so what is kept beside them
hangs on a slot that the first forward made.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

Phase = Literal["forward", "again", "replay"]


class Stored(Protocol):
    """A tensor in keeping: on its device, in host memory, or both."""

    def fetch(self) -> None:
        """Start bringing it back to its device, if it is not there."""

    def get(self) -> Tensor:
        """The tensor on its device, for use on the current stream."""

    def leave(self) -> None:
        """Give up the copy on the device where there is one in host memory."""

    def take(self) -> Tensor:
        """As `get`, for the last time: nothing keeps the tensor afterwards."""


class Store(Protocol):
    """Where the tensors of one block are kept.

    early: fetch what is needed next before the kernel that runs until then, and keep what has come:
    nothing is waited for, for more memory at the peak. Otherwise after it.
    """

    early: bool

    def put(self, x: Tensor) -> Stored: ...

    def let_go(self, tensors: Sequence[Stored]) -> None:
        """They are not needed on the device until backward; what keeps them may `leave` them."""

    def fetch_ahead(self) -> None:
        """Start fetching what backward needs first of the block that it comes to next."""


class _OnDevice:
    def __init__(self, x: Tensor) -> None:
        self._x: Tensor | None = x

    def fetch(self) -> None:
        pass

    def get(self) -> Tensor:
        assert self._x is not None
        return self._x

    def leave(self) -> None:
        pass

    def take(self) -> Tensor:
        x, self._x = self.get(), None
        return x


class DeviceStore:
    """Keeps tensors where they are."""

    early = False

    def put(self, x: Tensor) -> Stored:
        return _OnDevice(x)

    def let_go(self, tensors: Sequence[Stored]) -> None:
        pass

    def fetch_ahead(self) -> None:
        pass


class Outputs:
    """Attention's (out, lse) of each stage of one call, from the kernel to the end of its backward."""

    def __init__(self, store: Store | None = None) -> None:
        self._store: Store = DeviceStore() if store is None else store
        self._stages: list[tuple[Stored, Stored]] = []

    def add(self, out: Tensor, lse: Tensor) -> None:
        self._stages.append((self._store.put(out), self._store.put(lse)))

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Outputs:
        """From what `tensors` gave."""
        outputs = cls()
        for out, lse in zip(tensors[::2], tensors[1::2], strict=True):
            outputs.add(out, lse)
        return outputs

    def outs(self) -> list[Tensor]:
        for out, _ in self._stages:
            out.fetch()
        return [out.get() for out, _ in self._stages]

    def let_go(self) -> None:
        """They have been read for the block's output, and backward is still far."""
        self._store.let_go([stored for pair in self._stages for stored in pair])

    def await_backward(self) -> None:
        """They have been read for the block's output, and backward is next, stage by stage."""
        if not self._store.early:
            for out, lse in self._stages[1:]:
                out.leave()
                lse.leave()

    def before_kernel(self) -> None:
        """Backward is about to run a kernel."""
        if not self._store.early:
            return
        if self._stages:
            self._fetch_stage()
        else:
            self._store.fetch_ahead()

    def after_kernel(self) -> None:
        """What the kernel read is free: there is room for the next stage's."""
        if self._stages and not self._store.early:
            self._fetch_stage()

    def after_stages(self) -> None:
        """Every buffer of the stages is free, side by side: there is room for a whole block input."""
        if not self._store.early:
            self._store.fetch_ahead()

    def take(self) -> tuple[Tensor, Tensor]:
        """Of the first stage that has not been taken."""
        out, lse = self._stages.pop(0)
        return out.take(), lse.take()

    def tensors(self) -> list[Tensor]:
        """out, lse, out, lse, ..."""
        return [x.get() for pair in self._stages for x in pair]

    def _fetch_stage(self) -> None:
        for stored in self._stages[0]:
            stored.fetch()


class Slot:
    """Of one attention call of a block: its results, while they are kept.

    They lie on the tape, which does not know its slots: a graph that is thrown away has no cycle, so
    what it keeps is given back at once.
    """

    def __init__(self, tape: Tape, call: int) -> None:
        self._tape, self._call = tape, call

    def recall(self) -> Outputs | None:
        """The results that an earlier run kept, if any."""
        return self._tape.kept.get(self._call)

    def new_outputs(self) -> Outputs:
        return Outputs(self._tape.store if self._tape.keeps_now else None)

    def offer(self, outputs: Outputs) -> None:
        """``outputs`` have been read by this run; keep them if they are wanted later."""
        if not self._tape.keeps_now:
            return
        if self._tape.phase == "replay":
            outputs.await_backward()
        else:
            outputs.let_go()
        self._tape.kept[self._call] = outputs

    def take(self) -> Outputs:
        """For backward. Another pass through the same graph recomputes the block, and fills the slot."""
        return self._tape.kept.pop(self._call)


@dataclass
class Tape:
    """What one block keeps of its attention calls, in their order.

    keeps_forward: from its first run on (selective); otherwise from the run that computes it again.
    """

    keeps_forward: bool
    store: Store = field(default_factory=DeviceStore)
    phase: Phase = "forward"
    kept: dict[int, Outputs] = field(default_factory=dict)  # by call
    _next: int = 0

    @property
    def keeps_now(self) -> bool:
        return self.keeps_forward or self.phase != "forward"

    def restart(self, phase: Phase) -> None:
        self.phase, self._next = phase, 0

    def next_slot(self) -> Slot:
        self._next += 1
        return Slot(self, self._next - 1)


_current: ContextVar[Tape | None] = ContextVar("current_tape", default=None)


class running(AbstractContextManager[None]):
    """Context of one run of a block. Can be entered again: a graph kept with retain_graph is
    recomputed twice."""

    def __init__(self, tape: Tape, phase: Phase) -> None:
        self._tape, self._phase = tape, phase
        self._tokens: list[Token[Tape | None]] = []

    def __enter__(self) -> None:
        self._tape.restart(self._phase)
        self._tokens.append(_current.set(self._tape))

    def __exit__(self, *exception: object) -> None:
        _current.reset(self._tokens.pop())


def next_slot() -> Slot | None:
    """The place for the results of this call of attention; None outside of checkpointing."""
    tape = _current.get()
    return None if tape is None else tape.next_slot()


def is_recomputed() -> bool:
    """True in a checkpointed block: backward gets tensors that were made again for it alone."""
    return _current.get() is not None


def is_first_run() -> bool:
    """False while a checkpointed block is recomputed: backward goes through the graph of its first run."""
    tape = _current.get()
    return tape is None or tape.phase == "forward"


def output_is_unused() -> bool:
    """True while a block is replayed: the output of its last operation is read by nobody."""
    tape = _current.get()
    return tape is not None and tape.phase == "replay"
