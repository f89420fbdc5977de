"""One pass, forward or backward, over the stages of a block's attention half.

    per stage    project the stage's heads by tiles -> exchange -> kernel -> exchange
    K and V      projected and exchanged when a stage first needs them, kept until the last that does
    at the end   out of all stages through one output projection, by tiles, added to h

No full-size q, k, v or gradient of out exists: only those of the heads at hand. The normed input is made
again by tiles at every projection, unless it is to be held (1 B for that time), out is kept in sequence
layout (one block per owner, see comm.py), and dq, dk, dv are turned into the gradient of the normed
input stage by stage. With sum_kv_gradients, dk and dv of a group are first summed over its stages, which
needs two more buffers of KV heads and fewer exchanges.

Letters: B rows, T tokens of a rank, S all tokens of the row, M model width, D head dim, n query heads
and m KV heads of this rank at this stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchtitan_lc.attention.base import Projection, Projections
from torchtitan_lc.attention.bound import BoundProjection
from torchtitan_lc.attention.comm import HeadExchange, join_heads
from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.attention.heads import Heads, Stage
from torchtitan_lc.ops.recompute import Outputs, Slot
from torchtitan_lc.ops.tiled import GradSum, leaf, sum_dtype, tile_slices, vjp

if TYPE_CHECKING:
    from torchtitan_lc.attention.staged import StagedStrategy


class AttentionHalf:
    """One pass, forward or backward, over the stages."""

    def __init__(
        self,
        strategy: StagedStrategy,
        projections: Projections,
        documents: Documents | None,
        h: Tensor,
        positions: Tensor,
        weights: Sequence[Tensor],
    ) -> None:
        p = projections
        self.mask: dict[str, Any] = {"causal": p.causal, "scale": p.scale, "documents": documents}
        self.s, self.p, self.h, self.positions = strategy, projections, h, positions
        self.plan = strategy.plan(p.n_heads, p.n_kv_heads)
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

    def forward(self, slot: Slot | None) -> tuple[Tensor, Outputs]:
        """h1 [B, T, M], and per stage (out packed, lse), recalled from ``slot`` or computed."""
        outputs = None if slot is None else slot.recall()
        if outputs is None:
            outputs = Outputs() if slot is None else slot.new_outputs()
            self._attend(outputs)
        self.x = None
        h1 = self._add_outputs(outputs.outs())
        if slot is not None:
            slot.offer(outputs)
        return h1, outputs

    def _add_outputs(self, outs: Sequence[Tensor]) -> Tensor:
        """h + output(all heads): one matrix product over the heads of all stages, in their order.

        Adding stage after stage would round to the dtype of the residual stream once per stage, and
        the stream is larger than what is added.
        """
        stages = self.plan.stages
        exchanges = [self._exchange(stage.q_heads) for stage in stages]
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

    def _attend(self, outputs: Outputs) -> None:
        held: dict[int, tuple[Tensor, Tensor]] = {}
        for index, stage in enumerate(self.plan.stages):
            if any(stage.kv_heads):
                held[index] = self._project_key_value(stage)
            out, lse = self._stage_forward(stage, held)
            for arrival in stage.releases:
                del held[arrival]
            outputs.add(self._exchange(stage.q_heads).heads_to_seq(out), lse)

    def _stage_forward(
        self, stage: Stage, held: dict[int, tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """out [B, S, n, D] and lse [B, n, S] of this rank's heads."""
        q = self._project_query(stage)
        outs, lses = [], []
        for seg in stage.segments[self.s.rank]:
            k, v = (x[:, :, seg.kv_start : seg.kv_stop] for x in held[seg.arrival])
            part, part_lse = self.s.kernel.forward(
                q[:, :, seg.q_start : seg.q_stop], k, v, **self.mask
            )
            outs.append(part)
            lses.append(part_lse)
        if not outs:  # idle at this stage: no heads
            return q, q.new_empty(q.shape[0], 0, q.shape[1], dtype=torch.float32)
        return _join(outs, dim=2), _join(lses, dim=1)

    # -- backward

    def backward(
        self, dh1: Tensor, outputs: Outputs, needs_grad: Sequence[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """dh and the weights' gradients; uses up ``outputs``."""
        bounds = (self.norm, self.query, self.key_value, self.output)
        flags = list(needs_grad)
        for bound in bounds:
            bound.needs_grad = [flags.pop(0) for _ in bound.weights]
        dx = torch.zeros_like(self.h, memory_format=torch.contiguous_format)  # of the normed input
        held: dict[int, tuple[Tensor, Tensor]] = {}
        dheld: dict[int, list[Tensor]] = {}  # gradients of what is held, as far as they are summed
        for index, stage in enumerate(self.plan.stages):
            if any(stage.kv_heads):
                held[index] = self._project_key_value(stage)
            dqs = self._stage_backward(index, dh1, outputs, held, dheld)
            due = stage.releases if self.s.sum_kv_gradients else stage.arrivals
            # A rank without a kernel call on them has no gradient for K and V, but its part in sending it.
            dkvs = [
                (a, dheld.pop(a) if a in dheld else [torch.zeros_like(x) for x in held[a]]) for a in due
            ]
            for arrival in stage.releases:
                del held[arrival]
            outputs.after_kernel(
                index
            )  # what the kernel read is free: there is room for what is next
            self._query_backward(stage, dqs, dx)
            while dkvs:
                arrival, dkv = dkvs.pop(0)
                self._key_value_backward(self.plan.stages[arrival], dkv, dx)
        self.x = None
        dh = self._norm_backward(dh1, dx)
        return dh, [grad for bound in bounds for grad in bound.results()]

    def _stage_backward(
        self,
        index: int,
        dh1: Tensor,
        outputs: Outputs,
        held: dict[int, tuple[Tensor, Tensor]],
        dheld: dict[int, list[Tensor]],
    ) -> list[Tensor]:
        """Gradient of the stage's q, as [B, S, n, D] of some heads each; those of k and v are added to
        ``dheld``."""
        stage = self.plan.stages[index]
        exchange = self._exchange(stage.q_heads)
        out_packed, lse = outputs.take(index)
        dout = exchange.seq_to_heads(self._output_backward(stage, dh1, out_packed))
        out = exchange.seq_to_heads(out_packed)
        del out_packed
        q = self._project_query(stage)
        outputs.before_kernel(index)
        dqs = []
        for seg in stage.segments[self.s.rank]:
            heads, kv_heads = slice(seg.q_start, seg.q_stop), slice(seg.kv_start, seg.kv_stop)
            k, v = (x[:, :, kv_heads] for x in held[seg.arrival])
            dq, dk, dv = self.s.kernel.backward(
                dout[:, :, heads],
                q[:, :, heads],
                k,
                v,
                out[:, :, heads],
                lse[:, heads].contiguous(),
                **self.mask,
            )
            dqs.append(dq)
            first = seg.arrival not in dheld
            if first and dk.shape == held[seg.arrival][0].shape:
                dheld[seg.arrival] = [dk, dv]  # the first call's gradients become the sum
            else:
                if first:
                    dheld[seg.arrival] = [torch.zeros_like(x) for x in held[seg.arrival]]
                for total, part in zip(dheld[seg.arrival], (dk, dv), strict=True):
                    total[:, :, kv_heads] += part
            del dk, dv
        return dqs or [
            q
        ]  # q of a rank that is idle at this stage has no heads, nor has its gradient

    def _output_backward(self, stage: Stage, dh1: Tensor, out_packed: Tensor) -> Tensor:
        """Packed gradient of the stage's out; the output weights' gradient is collected."""
        exchange = self._exchange(stage.q_heads)
        dout = exchange.new_packed(out_packed)
        leaves = self.output.leaves(stage.all_q_heads)
        sums = [GradSum(w) for w in leaves]
        for start, stop in self._tiles():
            tile = leaf(exchange.read_rows(out_packed, start, stop))
            dtile, *dweights = vjp(self.output.fn, [tile, *leaves], [dh1[:, start:stop]])
            assert dtile is not None
            exchange.write_rows(dout, start, dtile)
            _add_all(sums, dweights)
        self.output.add_grads(stage.all_q_heads, sums)
        return dout

    def _query_backward(self, stage: Stage, dqs: list[Tensor], dx: Tensor) -> None:
        """Empties ``dqs``."""
        exchange = self._exchange(stage.q_heads)
        dq = _join(dqs, dim=2)
        dqs.clear()
        packed = exchange.heads_to_seq(dq)
        del dq

        def dq_tile(start: int, stop: int) -> list[Tensor]:
            return [exchange.read_rows(packed, start, stop)]

        self._projection_backward(self.query, stage.all_q_heads, dq_tile, dx)

    def _key_value_backward(self, stage: Stage, dkv: list[Tensor], dx: Tensor) -> None:
        """Empties ``dkv``."""
        exchange = self._exchange(stage.kv_heads)
        packed = [exchange.heads_to_seq(dkv.pop(0)), exchange.heads_to_seq(dkv.pop(0))]
        unique = _unique(stage.all_kv_heads)

        def dkv_tile(start: int, stop: int) -> list[Tensor]:
            tiles = [exchange.read_rows(part, start, stop) for part in packed]
            return [_sum_replicas(tile, stage.all_kv_heads, unique) for tile in tiles]

        self._projection_backward(self.key_value, unique, dkv_tile, dx)

    def _projection_backward(
        self,
        bound: BoundProjection,
        heads: Heads,
        grads_of: Callable[[int, int], list[Tensor]],
        dx: Tensor,
    ) -> None:
        """Add the gradient of the normed input to ``dx``, collect the weights'."""
        leaves = bound.leaves(heads)
        sums = [GradSum(w) for w in leaves]
        for start, stop in self._tiles():
            x = leaf(self._normed(start, stop))
            inputs = [x, self.positions[:, start:stop], *leaves]
            dx_tile, _, *dweights = vjp(bound.fn, inputs, grads_of(start, stop))
            assert dx_tile is not None
            dx[:, start:stop] += dx_tile
            _add_all(sums, dweights)
        bound.add_grads(heads, sums)

    def _norm_backward(self, dh1: Tensor, dx: Tensor) -> Tensor:
        """Gradient of h: that of the residual plus that through the norm, written over ``dx``."""
        leaves = [leaf(w, n) for w, n in zip(self.norm.weights, self.norm.needs_grad, strict=True)]
        sums = [GradSum(w) for w in leaves]
        for start, stop in self._tiles():
            tile = leaf(self.h[:, start:stop])
            dtile, *dweights = vjp(self.norm.fn, [tile, *leaves], [dx[:, start:stop]])
            assert dtile is not None
            torch.add(dh1[:, start:stop], dtile, out=dx[:, start:stop])
            _add_all(sums, dweights)
        self.norm.add_grads((), sums)
        return dx

    # -- shared by both

    def _project_query(self, stage: Stage) -> Tensor:
        """q of the stage's heads in head layout: [B, S, n, D]."""
        exchange = self._exchange(stage.q_heads)
        weights = self.query.cut(stage.all_q_heads)
        packed = exchange.new_packed(self.h)
        for start, stop in self._tiles():
            x = self._normed(start, stop)
            tile = self.query.fn(x, self.positions[:, start:stop], *weights)
            exchange.write_rows(packed, start, tile)
        return exchange.seq_to_heads(packed)

    def _project_key_value(self, stage: Stage) -> tuple[Tensor, Tensor]:
        """k and v of the KV heads that arrive with the stage: [B, S, m, D] each."""
        exchange = self._exchange(stage.kv_heads)
        unique = _unique(stage.all_kv_heads)
        weights = self.key_value.cut(unique)
        packed = [exchange.new_packed(self.h), exchange.new_packed(self.h)]
        for start, stop in self._tiles():
            x = self._normed(start, stop)
            tiles = self.key_value.fn(x, self.positions[:, start:stop], *weights)
            for part, tile in zip(packed, tiles, strict=True):
                exchange.write_rows(part, start, _replicate(tile, stage.all_kv_heads, unique))
        k = exchange.seq_to_heads(packed.pop(0))
        return k, exchange.seq_to_heads(packed.pop(0))

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

    def _exchange(self, heads: tuple[Heads, ...]) -> HeadExchange:
        return HeadExchange(
            counts=tuple(len(h) for h in heads),
            rank=self.s.rank,
            batch=self.h.shape[0],
            tokens=self.h.shape[1],
            head_dim=self.p.head_dim,
            group=self.s.group,
        )


def _add_all(sums: Sequence[GradSum], grads: Sequence[Tensor | None]) -> None:
    for total, grad in zip(sums, grads, strict=True):
        total.add(grad)


def _join(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


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
