"""What a checkpointed block hands from its forward to its recomputation.

A block under activation checkpointing runs twice: once in forward, once in backward, where only the
tensors that backward needs are of interest. Operations ask here which of the two is happening:

    forward, selective     with recording(tape):   the attention pushes its (out, lse)
    recomputation          with replaying(tape):   the attention takes them back, its kernel does not run
    recomputation, full    with replaying(None):   nothing was kept, everything is computed again

and in any recomputation the last operation of a block need not produce its output, because nobody
reads it (`output_is_unused`).

The state is a context variable: backward runs on a thread of autograd's own, and enters the
context there.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Tape:
    """Tensors kept by one block between forward and recomputation, first in, first out."""

    _entries: deque[tuple[Tensor, ...]] = field(default_factory=deque)

    def push(self, tensors: tuple[Tensor, ...]) -> None:
        self._entries.append(tensors)

    def pop(self) -> tuple[Tensor, ...]:
        """The oldest entry; it leaves the tape, so that its memory goes as soon as its user is done.

        Raises RuntimeError on an empty tape: a graph can be run backward only once.
        """
        if not self._entries:
            raise RuntimeError(
                "this block's kept attention outputs are used up: selective checkpointing allows one "
                "backward pass per forward pass (retain_graph=True needs mode 'full' or 'none')"
            )
        return self._entries.popleft()


@dataclass(frozen=True)
class _State:
    tape: Tape | None
    replay: bool


_state: ContextVar[_State | None] = ContextVar("recompute_state", default=None)


class _Entered:
    """Context manager that can be entered again: a graph kept with retain_graph recomputes twice."""

    def __init__(self, state: _State) -> None:
        self._new = state
        self._tokens: list[Token[_State | None]] = []

    def __enter__(self) -> None:
        self._tokens.append(_state.set(self._new))

    def __exit__(self, *exception: object) -> None:
        _state.reset(self._tokens.pop())


def recording(tape: Tape | None) -> AbstractContextManager[None]:
    """Context of a checkpointed forward; with a tape, what it keeps goes there."""
    return _Entered(_State(tape, replay=False))


def replaying(tape: Tape | None) -> AbstractContextManager[None]:
    """Context of the recomputation of the same block."""
    return _Entered(_State(tape, replay=True))


def tape_to_record() -> Tape | None:
    state = _state.get()
    return state.tape if state is not None and not state.replay else None


def tape_to_replay() -> Tape | None:
    state = _state.get()
    return state.tape if state is not None and state.replay else None


def output_is_unused() -> bool:
    """True while a block is recomputed: the output of its last operation is read by nobody."""
    state = _state.get()
    return state is not None and state.replay
