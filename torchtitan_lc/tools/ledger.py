"""Bytes by name through time: what is alive, and what was alive at the fullest moment.

A part that owns buffers writes down in plain integers what its code allocates and frees, in the order of
the code; whoever asks gets the fullest moment with a name on every byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Ledger:
    """``now`` and ``peak``: name -> bytes. ``base``: what is alive from the start."""

    def __init__(self, base: Mapping[str, int] | None = None) -> None:
        self.now: dict[str, int] = dict(base or {})
        self.peak: dict[str, int] = dict(self.now)
        self._total = self._most = sum(self.now.values())

    def take(self, name: str, size: int) -> None:
        self.now[name] = self.now.get(name, 0) + size
        self._total += size
        if self._total > self._most:
            self._most, self.peak = self._total, dict(self.now)

    def free(self, name: str, size: int | None = None) -> None:
        """Give back ``size`` bytes of ``name``, or all. Raises ValueError for more than there are."""
        held = self.now.pop(name, 0)
        size = held if size is None else size
        if size > held:
            raise ValueError(f"{size} bytes of {name!r} are freed, but only {held} are alive")
        if held > size:
            self.now[name] = held - size
        self._total -= size

    @contextmanager
    def during(self, **sizes: int) -> Iterator[None]:
        """Names (underscores for spaces) that live as long as the block."""
        named = {name.replace("_", " "): size for name, size in sizes.items()}
        for name, size in named.items():
            self.take(name, size)
        yield
        for name, size in named.items():
            self.free(name, size)

    def moment(self, **sizes: int) -> None:
        """Names that live for a moment, together."""
        with self.during(**sizes):
            pass
