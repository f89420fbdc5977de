"""What the attention half projects for a stage, forward and backward, by tiles of tokens.

The normed input is made again by tiles at every projection, unless it is to be held (1 B for that time).
Between a projection and the kernel lies an exchange: what is sent is written, and what arrives read, tile by
tile in the packed layout of comm.py, so that no second full-size buffer exists.

Letters: B rows, T tokens of a rank, S all tokens of the row, M model width, D head dim, n query heads
and m KV heads of this rank at this stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchtitan_lc.attention.base import Projection, Projections
from torchtitan_lc.attention.bound import BoundProjection, add_all, add_input_gradients
from torchtitan_lc.attention.comm import HeadExchange, Travelling, join_heads
from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.attention.heads import Heads, Stage
from torchtitan_lc.ops.tiled import GradSum, leaf, sum_dtype, tile_slices, vjp

if TYPE_CHECKING:
    from torchtitan_lc.attention.staged import StagedStrategy


class TiledProjections:
    """The projections of one call, bound to its weights and its hidden state."""

    def __init__(
        self,
        strategy: StagedStrategy,
        projections: Projections,
        documents: Documents | None,
        h: Tensor,
        places: Tensor,
        weights: Sequence[Tensor],
    ) -> None:
        p = projections
        self.mask: dict[str, Any] = {"causal": p.causal, "scale": p.scale, "documents": documents}
        self.s, self.p, self.h, self.places = strategy, projections, h, places
        self.plan = strategy.plan(p.n_heads, p.n_kv_heads)
        self.overlap = strategy.overlap_exchange and strategy.ranks > 1
        self.x: Tensor | None = None  # the normed input, where it is held
        left = list(weights)

        def bind(part: Projection, n_heads: int) -> BoundProjection:
            mine = [left.pop(0) for _ in part.weights]
            return BoundProjection(part, mine, n_heads)

        self.norm = bind(p.norm, 1)
        self.query = bind(p.query, p.n_heads)
        self.key_value = bind(p.key_value, p.n_kv_heads)
        self.output = bind(p.output, p.n_heads)

    # -- forward

    def project_query(self, stage: Stage) -> Travelling:
        """q of the stage's heads, to become [B, S, n, D]."""
        exchange = self.exchange(stage.q_heads)
        weights = self.query.cut(stage.all_q_heads)
        packed = exchange.new_packed(self.h)
        for start, stop in self._tiles():
            x = self._normed(start, stop)
            tile = self.query.fn(x, self.places[:, start:stop], *weights)
            exchange.write_rows(packed, start, tile)
        del x, tile  # the last ones; what is received needs memory now
        return exchange.seq_to_heads(packed, overlap=self.overlap)

    def project_key_value(self, stage: Stage) -> list[Travelling]:
        """k and v of the KV heads that arrive with the stage, to become [B, S, m, D] each."""
        exchange = self.exchange(stage.kv_heads)
        unique = _unique(stage.all_kv_heads)
        weights = self.key_value.cut(unique)
        packed = [exchange.new_packed(self.h), exchange.new_packed(self.h)]
        for start, stop in self._tiles():
            x = self._normed(start, stop)
            tiles = self.key_value.fn(x, self.places[:, start:stop], *weights)
            for part, tile in zip(packed, tiles, strict=True):
                exchange.write_rows(part, start, _replicate(tile, stage.all_kv_heads, unique))
        del x, tiles, part, tile
        return [exchange.seq_to_heads(packed.pop(0), overlap=self.overlap) for _ in range(2)]

    def add_outputs(self, outs: Sequence[Tensor]) -> Tensor:
        """h + output(all heads): one matrix product over the heads of all stages, in their order.

        Adding stage after stage would round to the dtype of the residual stream once per stage, and
        the stream is larger than what is added.
        """
        stages = self.plan.stages
        exchanges = [self.exchange(stage.q_heads) for stage in stages]
        wo = self.output.cut(tuple(head for stage in stages for head in stage.all_q_heads))
        h1 = torch.empty_like(self.h, memory_format=torch.contiguous_format)
        for start, stop in self._tiles():
            views = [
                view
                for exchange, out in zip(exchanges, outs, strict=True)
                for view in exchange.row_views(out, start, stop)
            ]
            y = self.output.fn(join_heads(views), *wo)
            torch.add(self.h[:, start:stop], y, out=h1[:, start:stop])
        return h1

    # -- backward

    def output_backward(self, stage: Stage, dh1: Tensor, out_packed: Tensor) -> Tensor:
        """Packed gradient of the stage's out; the output weights' gradient is collected."""
        exchange = self.exchange(stage.q_heads)
        dout = exchange.new_packed(out_packed)
        leaves = self.output.leaves(stage.all_q_heads)
        sums = [GradSum(w) for w in leaves]
        for start, stop in self._tiles():
            tile = leaf(exchange.read_rows(out_packed, start, stop))
            dtile, *dweights = vjp(self.output.gradients, [tile, *leaves], [dh1[:, start:stop]])
            assert dtile is not None
            exchange.write_rows(dout, start, dtile)
            add_all(sums, dweights)
        self.output.add_grads(stage.all_q_heads, sums)
        return dout

    def projection_backward(
        self,
        bound: BoundProjection,
        exchange: HeadExchange,
        heads: Heads,
        packed: list[Tensor],
        dx: Tensor,
    ) -> None:
        """packed: gradients of what ``bound`` makes of the normed input, for ``heads``, of which some
        may appear for several ranks. Adds to ``dx``, and collects the weights' gradients."""
        unique = _unique(heads)
        leaves = bound.leaves(unique)
        sums = [GradSum(w) for w in leaves]
        for start, stop in self._tiles():
            x, places = self._normed(start, stop), self.places[:, start:stop]
            tiles = [exchange.read_rows(part, start, stop) for part in packed]
            grads = [_sum_replicas(tile, heads, unique) for tile in tiles]
            add_input_gradients(bound.part, x, places, leaves, grads, dx[:, start:stop], sums)
        bound.add_grads(unique, sums)

    def norm_backward(self, dh1: Tensor, dx: Tensor) -> Tensor:
        """Gradient of h: that of the residual plus that through the norm, written over ``dx``."""
        leaves = [leaf(w, n) for w, n in zip(self.norm.weights, self.norm.needs_grad, strict=True)]
        sums = [GradSum(w) for w in leaves]
        for start, stop in self._tiles():
            tile = leaf(self.h[:, start:stop])
            dtile, *dweights = vjp(self.norm.gradients, [tile, *leaves], [dx[:, start:stop]])
            assert dtile is not None
            torch.add(dh1[:, start:stop], dtile, out=dx[:, start:stop])
            add_all(sums, dweights)
        self.norm.add_grads((), sums)
        return dx

    # -- shared by both

    def _normed(self, start: int, stop: int) -> Tensor:
        if self.s.hold_normed_input:
            if self.x is None:
                self.x = torch.empty_like(self.h, memory_format=torch.contiguous_format)
                for a, b in self._tiles():
                    self.x[:, a:b] = self.norm.fn(self.h[:, a:b], *self.norm.weights)
            return self.x[:, start:stop]
        return self.norm.fn(self.h[:, start:stop], *self.norm.weights)

    def _tiles(self) -> list[tuple[int, int]]:
        return list(tile_slices(self.h.shape[1], self.s.tile_tokens, self.h.shape[0]))

    def exchange(self, heads: tuple[Heads, ...]) -> HeadExchange:
        return HeadExchange(
            counts=tuple(len(h) for h in heads),
            rank=self.s.rank,
            batch=self.h.shape[0],
            tokens=self.h.shape[1],
            head_dim=self.p.head_dim,
            group=self.s.group,
        )


def _unique(heads: Heads) -> Heads:
    return tuple(sorted(set(heads)))


def _replicate(tile: Tensor, heads: Heads, unique: Heads) -> Tensor:
    """[B, t, len(unique), D] -> [B, t, len(heads), D]: a KV head for each rank that needs it."""
    if heads == unique:
        return tile
    return torch.cat([tile.narrow(2, unique.index(head), 1) for head in heads], dim=2)


def _sum_replicas(tile: Tensor, heads: Heads, unique: Heads) -> Tensor:
    """The adjoint of `_replicate`, summed in at least fp32."""
    if heads == unique:
        return tile
    total = tile.new_zeros(*tile.shape[:2], len(unique), tile.shape[3], dtype=sum_dtype(tile.dtype))
    for i, head in enumerate(heads):
        total[:, :, unique.index(head)] += tile[:, :, i]
    return total.to(tile.dtype)
