"""The exchange of Ulysses: from "my tokens, everybody's heads" to "all tokens, my heads" and back.

    sequence layout (packed)                     head layout
    rank r holds its T tokens of every head      rank u holds all S = U*T tokens of its heads
    [owner 0: B,T,n0,D | owner 1: B,T,n1,D | …]  [B, S, n_u, D]

The packed buffer is one flat tensor with a block per owner, because that is the order in which
all_to_all_single sends. With one row (B = 1) what arrives, [U(source), T, n, D], already is the whole
sequence in order: neither direction copies. Tiles of rows are written to and read from the packed
buffer directly, so that no second full-size buffer exists.

With overlap an exchange runs on the communication stream while the current one goes on; otherwise the
current stream waits for it at once.

Counts are stated, never communicated (a collective only to learn a shape deadlocks under
recomputation), and every rank calls every exchange of a stage in the same order, also a rank that has
no head in it.

Letters: B rows, T tokens of a rank, S all tokens, U ranks, n_u heads of rank u at this stage, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist


class Travelling:
    """A tensor that peers are sending: `arrive` once, before its first use on the current stream."""

    def __init__(
        self, arrived: Callable[[], torch.Tensor], under_way: tuple[Any, torch.Tensor] | None = None
    ) -> None:
        self._arrived: Callable[[], torch.Tensor] | None = arrived
        self._under_way = under_way  # with what is being sent, which must not be freed until then

    def arrive(self) -> torch.Tensor:
        assert self._arrived is not None
        if self._under_way is not None:
            self._under_way[0].wait()
        arrived, self._arrived, self._under_way = self._arrived, None, None
        return arrived()


@dataclass(frozen=True)
class HeadExchange:
    """One exchange between the ranks of ``group`` (None: a single rank, nothing travels).

    counts: heads of each rank, by rank within the group. Collective when there is more than one rank.
    """

    counts: tuple[int, ...]
    rank: int
    batch: int
    tokens: int
    head_dim: int
    group: dist.ProcessGroup | None

    @property
    def mine(self) -> int:
        return self.counts[self.rank]

    @property
    def packed_numel(self) -> int:
        return self.batch * self.tokens * sum(self.counts) * self.head_dim

    def new_packed(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(self.packed_numel)

    def blocks(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Views [B, T, n_u, D] of the packed buffer, one for each owner."""
        sizes = self._block_sizes()
        return [
            block.view(self.batch, self.tokens, count, self.head_dim)
            for block, count in zip(packed.split(sizes), self.counts, strict=True)
        ]

    def write_rows(self, packed: torch.Tensor, start: int, tile: torch.Tensor) -> None:
        """Store ``tile`` [B, t, sum(counts), D], tokens start..start+t, owner by owner."""
        stop = start + tile.shape[1]
        if len(set(self.counts)) == 1:  # one kernel for all owners
            by_owner = packed.view(
                len(self.counts), self.batch, self.tokens, self.mine, self.head_dim
            )
            of_tile = tile.unflatten(2, (len(self.counts), self.mine))
            by_owner[:, :, start:stop].copy_(of_tile.permute(2, 0, 1, 3, 4))
            return
        ends = list(accumulate(self.counts))
        for block, end, count in zip(self.blocks(packed), ends, self.counts, strict=True):
            if count:
                block[:, start:stop].copy_(tile[:, :, end - count : end])

    def row_views(self, packed: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
        """Tokens start..stop as views [B, t, n_u, D], one for each owner that has heads."""
        return [
            block[:, start:stop]
            for block, count in zip(self.blocks(packed), self.counts, strict=True)
            if count
        ]

    def read_rows(self, packed: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Tokens start..stop of all heads: [B, t, sum(counts), D] (a view when one rank owns all)."""
        return join_heads(self.row_views(packed, start, stop))

    def seq_to_heads(self, packed: torch.Tensor, *, overlap: bool = False) -> Travelling:
        """packed [sum(counts) heads of my tokens] -> [B, S, n_mine, D], tokens in sequence order."""
        ranks = len(self.counts)
        if ranks == 1:
            there = packed.view(self.batch, self.tokens, self.mine, self.head_dim)
            return Travelling(lambda: there)
        received = packed.new_empty(ranks * self._block_sizes()[self.rank])
        sizes = [self._block_sizes()[self.rank]] * ranks

        def arrived() -> torch.Tensor:
            by_source = received.view(ranks, self.batch, self.tokens, self.mine, self.head_dim)
            # [U, B, T, n, D] -> [B, U*T, n, D]; a view when B == 1
            return by_source.transpose(0, 1).reshape(
                self.batch, ranks * self.tokens, self.mine, self.head_dim
            )

        return self._send(received, packed, sizes, self._block_sizes(), overlap, arrived)

    def heads_to_seq(self, x: torch.Tensor, *, overlap: bool = False) -> Travelling:
        """[B, S, n_mine, D] -> packed [sum(counts) heads of my tokens]; the inverse of seq_to_heads."""
        ranks = len(self.counts)
        if ranks == 1:
            there = x.contiguous().view(-1)
            return Travelling(lambda: there)
        by_target = x.view(self.batch, ranks, self.tokens, self.mine, self.head_dim)
        # [B, U*T, n, D] -> [U, B, T, n, D]; a view when B == 1
        send = by_target.transpose(0, 1).contiguous().view(-1)
        received = x.new_empty(self.packed_numel)
        sizes = [self._block_sizes()[self.rank]] * ranks
        return self._send(received, send, self._block_sizes(), sizes, overlap, lambda: received)

    def _send(
        self,
        received: torch.Tensor,
        send: torch.Tensor,
        receive_sizes: list[int],
        send_sizes: list[int],
        overlap: bool,
        arrived: Callable[[], torch.Tensor],
    ) -> Travelling:
        work = dist.all_to_all_single(
            received, send, receive_sizes, send_sizes, group=self.group, async_op=overlap
        )
        return Travelling(arrived, (work, send) if overlap else None)

    def _block_sizes(self) -> list[int]:
        return [self.batch * self.tokens * count * self.head_dim for count in self.counts]


def join_heads(parts: list[torch.Tensor]) -> torch.Tensor:
    """[B, t, n_i, D] side by side along the heads; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
