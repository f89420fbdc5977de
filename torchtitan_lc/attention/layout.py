"""Which tokens of a row a rank holds. Pure: ranks and sizes are passed in, no process group is asked.

    Ulysses only, 4 ranks     row:  0 1 2 3 4 5 6 7      rank 0: 0 1   rank 1: 2 3   rank 2: 4 5   …

    ring of 2 (zigzag)        row:  0 1 2 3              ring rank 0: 0 3   ring rank 1: 1 2
    each chunk a quarter            the first chunk sees little under a causal mask, the last sees all:
                                    each rank holds one of either, so all have the same work

    ring of 2 x Ulysses of 2  the tokens of a ring rank are cut again, in order, over its Ulysses ranks

The rank within a row is ring_rank * ulysses + ulysses_rank: those who exchange heads are neighbours.
Everything that has one value per token (ids, labels, positions) is cut by the same call, so that no
tensor can be left behind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Range = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """ulysses x ring ranks hold equal parts of every row."""

    ulysses: int = 1
    ring: int = 1

    @property
    def ranks(self) -> int:
        return self.ulysses * self.ring

    @property
    def multiple(self) -> int:
        """A row's length must be a multiple of this; the data is padded to it."""
        if self.ring == 1:
            return self.ulysses
        return math.lcm(2 * self.ring, self.ring * self.ulysses)

    def tokens(self, seq_len: int) -> int:
        """Tokens of a row of ``seq_len``, padded, that a rank holds."""
        return -(-seq_len // self.multiple) * self.multiple // self.ranks

    def check(self, seq_len: int) -> None:
        if seq_len < self.multiple or seq_len % self.multiple:
            raise ValueError(
                f"a row of {seq_len} tokens cannot be cut into equal parts over {self.ulysses} "
                f"Ulysses x {self.ring} ring ranks: it must be a multiple of {self.multiple}, for "
                f"example {-(-seq_len // self.multiple) * self.multiple}"
            )

    def ring_ranges(self, ring_rank: int, seq_len: int) -> list[Range]:
        """The stretches of the row that the Ulysses ranks of ``ring_rank`` hold together, in order."""
        if self.ring == 1:
            return [(0, seq_len)]
        chunk = seq_len // (2 * self.ring)
        chunks = (ring_rank, 2 * self.ring - 1 - ring_rank)
        return [(c * chunk, (c + 1) * chunk) for c in chunks]

    def ranges(self, rank: int, seq_len: int) -> list[Range]:
        """The stretches of the row that ``rank`` holds, in the order in which it holds them."""
        self.check(seq_len)
        ring_rank, ulysses_rank = divmod(rank, self.ulysses)
        size = seq_len // self.ranks
        first, last = ulysses_rank * size, (ulysses_rank + 1) * size
        mine, at = [], 0
        for start, stop in self.ring_ranges(ring_rank, seq_len):
            lo, hi = max(first - at, 0), min(last - at, stop - start)
            if lo < hi:
                mine.append((start + lo, start + hi))
            at += stop - start
        return mine

    def shard(self, batch: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """The part of every tensor [B, S] that ``rank`` holds: [B, S / ranks].

        Raises ValueError for a tensor of another shape: guessing its token axis would cut the wrong one.
        """
        shapes = {name: tuple(x.shape) for name, x in batch.items()}
        if len(set(shapes.values())) > 1 or any(len(shape) != 2 for shape in shapes.values()):
            raise ValueError(f"every tensor of a batch must be [rows, tokens] alike, got {shapes}")
        return {
            name: torch.cat([x[:, a:b] for a, b in self.ranges(rank, x.shape[1])], dim=1)
            for name, x in batch.items()
        }

    def unshard(self, parts: list[Tensor]) -> Tensor:
        """The inverse of `shard`: one tensor [B, S / ranks, ...] per rank -> [B, S, ...] in row order."""
        seq_len = self.ranks * parts[0].shape[1]
        whole = parts[0].new_empty(parts[0].shape[0], seq_len, *parts[0].shape[2:])
        for rank, part in enumerate(parts):
            at = 0
            for start, stop in self.ranges(rank, seq_len):
                whole[:, start:stop] = part[:, at : at + stop - start]
                at += stop - start
        return whole
