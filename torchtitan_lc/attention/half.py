"""One pass, forward or backward, over the stages of a block's attention half.

    per stage    project the stage's heads by tiles -> exchange -> kernel -> exchange
    K and V      projected and exchanged when a stage first needs them, kept until the last that does
    at the end   out of all stages through one output projection, by tiles, added to h

No full-size q, k, v or gradient of out exists: only those of the heads at hand. Out is kept in sequence
layout (one block per owner, see comm.py), and dq, dk, dv are turned into the gradient of the normed
input stage by stage (projecting.py). With sum_kv_gradients, dk and dv of a group are first summed over
its stages, which needs two more buffers of KV heads and fewer exchanges. With overlap_exchange what comes
of a stage returns while the next one's heads are projected, and in backward these are on their way while
what has returned is turned into the gradient of the normed input. No heads travel while a kernel runs:
an exchange that meets a kernel of long-lived thread blocks may start on one rank and not on the other,
and occupies multiprocessors there until the kernel has ended.

Letters: B rows, T tokens of a rank, S all tokens of the row, M model width, D head dim, n query heads
and m KV heads of this rank at this stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchtitan_lc.attention.bound import BoundProjection
from torchtitan_lc.attention.comm import HeadExchange, Travelling
from torchtitan_lc.attention.heads import Heads, Stage
from torchtitan_lc.attention.projecting import TiledProjections
from torchtitan_lc.ops.recompute import Outputs, Slot


class AttentionHalf(TiledProjections):
    """One pass, forward or backward, over the stages."""

    # -- forward

    def forward(self, slot: Slot | None) -> tuple[Tensor, Outputs]:
        """h1 [B, T, M], and per stage (out packed, lse), recalled from ``slot`` or computed."""
        outputs = None if slot is None else slot.recall()
        if outputs is None:
            outputs = Outputs() if slot is None else slot.new_outputs()
            self._attend(outputs)
        self.x = None
        h1 = self.add_outputs(outputs.outs())
        if slot is not None:
            slot.offer(outputs)
        return h1, outputs

    def _attend(self, outputs: Outputs) -> None:
        held: dict[int, tuple[Tensor, Tensor]] = {}
        stages = self.plan.stages
        ahead = self._inputs_of(0)
        for index, stage in enumerate(stages):
            more = index + 1 < len(stages)
            q = self._arrive(index, ahead, held).pop()
            out, lse = self._stage_forward(stage, q, held)
            del q
            for arrival in stage.releases:
                del held[arrival]
            returning = self.exchange(stage.q_heads).heads_to_seq(out, overlap=self.overlap)
            del out
            if more and self.overlap:
                ahead = self._inputs_of(index + 1)
            outputs.add(returning.arrive(), lse)
            if more and not self.overlap:
                ahead = self._inputs_of(index + 1)

    def _stage_forward(
        self, stage: Stage, q: Tensor, held: dict[int, tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """out [B, S, n, D] and lse [B, n, S] of this rank's heads."""
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
        stages = self.plan.stages
        ahead = self._backward_inputs_of(0, dh1, outputs)
        for index, stage in enumerate(stages):
            more = index + 1 < len(stages)
            *lse, out, dout, q = self._arrive(index, ahead, held)
            outputs.before_kernel()
            dqs = self._stage_backward(stage, [dout, q, out, *lse], held, dheld)
            del lse, out, dout, q
            due = stage.releases if self.s.sum_kv_gradients else stage.arrivals
            # A rank without a kernel call on them has no gradient for K and V, but its part in sending it.
            dkvs = {
                a: dheld.pop(a) if a in dheld else [torch.zeros_like(x) for x in held[a]]
                for a in due
            }
            for arrival in stage.releases:
                del held[arrival]
            outputs.after_kernel()
            finish = self._send_back(stage, dqs, dkvs, dx)
            if more and self.overlap:
                ahead = self._backward_inputs_of(index + 1, dh1, outputs)
            finish()
            if more and not self.overlap:
                ahead = self._backward_inputs_of(index + 1, dh1, outputs)
        outputs.after_stages()
        self.x = None
        dh = self.norm_backward(dh1, dx)
        return dh, [grad for bound in bounds for grad in bound.results()]

    def _backward_inputs_of(
        self, index: int, dh1: Tensor, outputs: Outputs
    ) -> list[Travelling | Tensor]:
        """lse, and on their way: out, its gradient, q, and k and v if they arrive with this stage."""
        stage = self.plan.stages[index]
        inputs = self._inputs_of(index)  # first: out may be on its way from the host meanwhile
        exchange = self.exchange(stage.q_heads)
        out_packed, lse = outputs.take()
        dout = exchange.seq_to_heads(
            self.output_backward(stage, dh1, out_packed), overlap=self.overlap
        )
        out = exchange.seq_to_heads(out_packed, overlap=self.overlap)
        del out_packed
        return [lse, out, dout, *inputs]

    def _stage_backward(
        self,
        stage: Stage,
        inputs: list[Tensor],
        held: dict[int, tuple[Tensor, Tensor]],
        dheld: dict[int, list[Tensor]],
    ) -> list[Tensor]:
        """inputs: dout, q, out, lse of the stage's heads; empties it. The gradient of q, as
        [B, S, n, D] of some heads each; those of k and v are added to ``dheld``."""
        dout, q, out, lse = inputs
        inputs.clear()
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
        return dqs or [q]  # of a rank that is idle at this stage: no heads, like their gradient

    def _send_back(
        self, stage: Stage, dqs: list[Tensor], dkvs: dict[int, list[Tensor]], dx: Tensor
    ) -> Callable[[], None]:
        """Start the gradients on their way; the result turns what arrives into the gradient of the
        normed input. Empties ``dqs`` and ``dkvs``."""
        parts: list[tuple[BoundProjection, HeadExchange, Heads, list[Travelling]]] = []
        exchange, dq = self.exchange(stage.q_heads), _join(dqs, dim=2)
        dqs.clear()
        sent = [exchange.heads_to_seq(dq, overlap=self.overlap)]
        del dq
        parts.append((self.query, exchange, stage.all_q_heads, sent))
        while dkvs:
            arrival = next(iter(dkvs))
            dkv, arrived = dkvs.pop(arrival), self.plan.stages[arrival]
            exchange = self.exchange(arrived.kv_heads)
            sent = [exchange.heads_to_seq(dkv.pop(0), overlap=self.overlap) for _ in range(2)]
            parts.append((self.key_value, exchange, arrived.all_kv_heads, sent))

        def finish() -> None:
            while parts:
                bound, exchange, heads, sent = parts.pop(0)
                packed = [sent.pop(0).arrive() for _ in range(len(sent))]
                self.projection_backward(bound, exchange, heads, packed, dx)

        return finish

    # -- shared by both

    def _inputs_of(self, index: int) -> list[Travelling | Tensor]:
        """On their way: q of the stage's heads, and before it k and v if they arrive with it."""
        stage = self.plan.stages[index]
        kv = self.project_key_value(stage) if any(stage.kv_heads) else []
        return [*kv, self.project_query(stage)]

    def _arrive(
        self,
        index: int,
        travelling: list[Travelling | Tensor],
        held: dict[int, tuple[Tensor, Tensor]],
    ) -> list[Tensor]:
        """What has been under way, k and v going to ``held``. Empties ``travelling``."""
        arrived = [x.arrive() if isinstance(x, Travelling) else x for x in travelling]
        travelling.clear()
        if any(self.plan.stages[index].kv_heads):
            v = arrived.pop(-2)
            held[index] = (arrived.pop(-2), v)
        return arrived


def _join(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
