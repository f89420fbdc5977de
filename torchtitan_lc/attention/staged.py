"""The attention half of a block as one function that owns its buffers: h + output(attend(norm(h))).

It walks through the stages of a head plan (half.py). With one stage it is Ulysses, with several Untied
Ulysses, with one rank plain attention; forward and backward are written once for all three.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from torchtitan_lc.attention.base import ALONE, AttentionShape, Peers, Projections
from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.attention.half import AttentionHalf
from torchtitan_lc.attention.heads import HeadPlan, plan_heads
from torchtitan_lc.attention.kernels import Kernel
from torchtitan_lc.attention.kernels.split import SplitGroups
from torchtitan_lc.attention.layout import Layout
from torchtitan_lc.attention.ring import Ring
from torchtitan_lc.ops.recompute import Outputs, next_slot


class StagedStrategy:
    """What all strategies have in common.

    ulysses: the ranks that exchange heads. ring: those that pass K and V round, around the kernel
    (ring.py). heads_per_stage: query heads per rank and stage, None for all at once. tile_tokens:
    tokens projected at once (0: all).
    Three that spend memory on time: hold_normed_input keeps the normed input from the first projection
    to the last, instead of making it again by tiles for each; sum_kv_gradients sums the gradients of K
    and V over the stages that use them before they travel, instead of sending each; overlap_exchange
    exchanges beside the projections of other stages, with the buffers of one more stage between kernels.
    """

    name = "staged"

    def __init__(
        self,
        kernel: Kernel,
        *,
        ulysses: Peers = ALONE,
        ring: Peers = ALONE,
        heads_per_stage: int | None = None,
        tile_tokens: int = 0,
        hold_normed_input: bool = False,
        sum_kv_gradients: bool = True,
        overlap_exchange: bool = False,
    ) -> None:
        self.ring = ring
        self.use_kernel(kernel)
        self.ranks, self.rank, self.group = ulysses.ranks, ulysses.rank, ulysses.group
        self.heads_per_stage = heads_per_stage
        self.tile_tokens = tile_tokens
        self.hold_normed_input = hold_normed_input
        self.sum_kv_gradients = sum_kv_gradients
        self.overlap_exchange = overlap_exchange
        self.layout = Layout(ulysses.ranks, ring.ranks)

    def use_kernel(self, kernel: Kernel) -> None:
        self.kernel: Kernel = SplitGroups(kernel)
        if self.ring.ranks > 1:
            ring = self.ring
            self.kernel = Ring(self.kernel, ranks=ring.ranks, rank=ring.rank, group=ring.group)

    def plan(self, n_heads: int, n_kv_heads: int) -> HeadPlan:
        return plan_heads(n_heads, n_kv_heads, self.ranks, self.heads_per_stage)

    def check(self, shape: AttentionShape) -> None:
        self.plan(shape.n_heads, shape.n_kv_heads)

    def describe(self, shape: AttentionShape) -> str:
        plan = self.plan(shape.n_heads, shape.n_kv_heads)
        stages, width = len(plan.stages), plan.heads_per_stage
        text = (
            f"{self.name}: {shape.n_heads} query and {shape.n_kv_heads} KV heads over {self.ranks} "
            f"rank{'s' if self.ranks > 1 else ''}, {stages} stage{'s' if stages > 1 else ''} of "
            f"{width} head{'s' if width > 1 else ''} per rank"
        )
        if plan.idle_slots:
            text += f", {plan.idle_slots} of {plan.slots} slots idle"
        if self.layout.ring > 1:
            text += f", inside a ring of {self.layout.ring} (zigzag)"
        text += ", normed input held" if self.hold_normed_input else ", normed input made again"
        if stages > 1:
            how = "summed over stages" if self.sum_kv_gradients else "sent by each stage"
            text += f", K/V gradients {how}"
        if self.overlap_exchange and self.ranks > 1:
            text += ", exchanges overlapped"
        return text

    def kept_bytes(self, shape: AttentionShape, rows: int, tokens: int, itemsize: int) -> int:
        """What one call keeps for backward on the rank with most heads: out of its ``tokens``, lse of its
        heads. The same on all ranks, as what follows from it is planned by each."""
        out = rows * tokens * shape.n_heads * shape.head_dim * itemsize
        stages = self.plan(shape.n_heads, shape.n_kv_heads).stages
        heads = sum(max(len(heads) for heads in stage.q_heads) for stage in stages)
        return out + rows * tokens * self.ranks * heads * max(4, itemsize)  # lse: at least fp32

    def attend(
        self,
        h: Tensor,
        places: Tensor,
        projections: Projections,
        documents: Documents | None = None,
    ) -> Tensor:
        weights = [
            w.tensor
            for part in (
                projections.norm,
                projections.query,
                projections.key_value,
                projections.output,
            )
            for w in part.weights
        ]
        return _Attend.apply(self, projections, documents, h, places, *weights)


class _Attend(Function):
    """Weights are inputs, so that their gradients leave through autograd and FSDP's hooks fire."""

    @staticmethod
    def forward(
        ctx: Any,
        strategy: StagedStrategy,
        projections: Projections,
        documents: Documents | None,
        h: Tensor,
        places: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.of = (strategy, projections, documents)
        ctx.slot = slot = next_slot()
        half = AttentionHalf(strategy, projections, documents, h, places, weights)
        h1, outputs = half.forward(slot)
        kept = outputs.tensors() if slot is None else []
        ctx.save_for_backward(h, places, *weights, *kept)
        return h1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh1: Tensor) -> tuple[Tensor | None, ...]:
        strategy, projections, documents = ctx.of
        needs_grad = ctx.needs_input_grad[5:]
        h, places, *rest = ctx.saved_tensors  # reading them recomputes a checkpointed block
        weights, kept = rest[: len(needs_grad)], rest[len(needs_grad) :]
        outputs = Outputs.of(kept) if ctx.slot is None else ctx.slot.take()
        del rest, kept  # outputs are used up stage by stage: nothing else may hold them
        half = AttentionHalf(strategy, projections, documents, h, places, weights)
        dh, dweights = half.backward(dh1.contiguous(), outputs, needs_grad)
        return (None, None, None, dh, None, *dweights)
