"""Which tokens of a row a rank holds. Pure: rank and size are passed in, no process group is asked.

    contiguous, 4 ranks      row:  0 1 2 3 4 5 6 7        rank 0: 0 1   rank 1: 2 3   rank 2: 4 5   …

Everything that has one value per token (ids, labels, positions) is cut by the same call, so that no
tensor can be left behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Contiguous shards: rank r of ``ranks`` holds tokens [r*T, (r+1)*T), T = S / ranks."""

    ranks: int

    @property
    def multiple(self) -> int:
        """S must be a multiple of this."""
        return self.ranks

    def check(self, seq_len: int) -> None:
        if seq_len < self.multiple or seq_len % self.multiple:
            below = seq_len // self.multiple * self.multiple
            near = [n for n in (below, below + self.multiple) if n > 0]
            raise ValueError(
                f"training.seq_len = {seq_len} cannot be cut into equal shards over "
                f"parallelism.context_parallel_degree = {self.ranks}: it must be a multiple of "
                f"{self.multiple}, for example {' or '.join(map(str, near))}"
            )

    def shard(self, batch: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """The part of every tensor [B, S] that ``rank`` holds: [B, T].

        Raises ValueError for a tensor of another shape: guessing its token axis would cut the wrong one.
        """
        shapes = {name: tuple(x.shape) for name, x in batch.items()}
        if len(set(shapes.values())) > 1 or any(len(shape) != 2 for shape in shapes.values()):
            raise ValueError(f"every tensor of a batch must be [rows, tokens] alike, got {shapes}")
        shards = {}
        for name, x in batch.items():
            self.check(x.shape[1])
            shards[name] = x.chunk(self.ranks, dim=1)[rank].contiguous()
        return shards
