"""Loss of a token-wise head in tiles: the full logits never exist.

The gradient is made in forward, tile by tile, while the tile's logits are there (as Liger's fused linear
cross entropy does): logits are computed once, not twice. That is exact because the result is a plain
sum over tokens, whose gradient scales with the one upstream number; other reductions are not offered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtitan_lc.ops.tiled import GradSum, leaf, sum_dtype, tile_slices, vjp

IGNORE_INDEX = -100
_PART = 1 << 24  # elements scaled at once


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over live labels of the cross entropy, in at least fp32.

    logits [B, t, V], labels [B, t] int64 with IGNORE_INDEX where no token is trained. Zero, not NaN,
    when no label is live.
    """
    wide = logits.flatten(0, 1).to(sum_dtype(logits.dtype))
    return F.cross_entropy(wide, labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fn: Callable[..., Tensor],
        tile_tokens: int,
        want_grads: bool,
        x: Tensor,
        labels: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        # needs_input_grad is about the inputs alone; under no_grad no backward will come.
        needs = ctx.needs_input_grad[3:] if want_grads else (False,) * (2 + len(weights))
        needs_x, _, *needs_weights = needs
        leaves = [leaf(w, need) for w, need in zip(weights, needs_weights, strict=True)]
        sums = [GradSum(w) for w in weights]
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
        total = torch.zeros((), dtype=sum_dtype(x.dtype), device=x.device)
        for start, stop in tile_slices(x.shape[1], tile_tokens, x.shape[0]):
            labels_tile = labels[:, start:stop]
            if not any(needs):
                total += fn(x[:, start:stop], labels_tile, *weights)
                continue
            x_tile = leaf(x[:, start:stop], needs_x)
            part, dx_tile, dweights = _loss_with_grads(fn, x_tile, labels_tile, leaves)
            total += part
            if dx is not None:
                dx[:, start:stop] = 0 if dx_tile is None else dx_tile
            for grad_sum, grad in zip(sums, dweights, strict=True):
                grad_sum.add(grad)
        dweights = [s.result() if n else None for s, n in zip(sums, needs_weights, strict=True)]
        # Saved, not kept as attributes: whoever holds the loss holds ctx through the backward of all
        # layers, but autograd drops what is saved as soon as it is used.
        ctx.save_for_backward(dx, *dweights)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dx, *dweights = (
            None if grad is None else _scaled(grad, dloss) for grad in ctx.saved_tensors
        )
        return (None, None, None, dx, None, *dweights)


def _scaled(grad: Tensor, factor: Tensor) -> Tensor:
    """grad * factor in grad's dtype, multiplied in at least fp32: rounded to bf16 first, one over the
    number of labels would be off by up to 1/512, and every gradient with it. By parts, so that no wide
    copy exists."""
    dim = max(range(grad.dim()), key=lambda d: grad.shape[d])
    step = max(1, _PART * grad.shape[dim] // max(1, grad.numel()))
    result = torch.empty_like(grad)
    for part, target in zip(grad.split(step, dim), result.split(step, dim), strict=True):
        target.copy_(part.to(sum_dtype(grad.dtype)) * factor)
    return result


def _loss_with_grads(
    fn: Callable[..., Tensor], x: Tensor, labels: Tensor, weights: list[Tensor]
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    losses: list[Tensor] = []

    def loss(x: Tensor, *weights: Tensor) -> Tensor:
        losses.append(fn(x, labels, *weights))
        return losses[0]

    one = torch.ones((), dtype=sum_dtype(x.dtype), device=x.device)
    dx, *dweights = vjp(loss, [x, *weights], [one])
    return losses[0].detach(), dx, dweights


def tiled_loss(
    fn: Callable[..., Tensor], x: Tensor, labels: Tensor, *weights: Tensor, tile_tokens: int
) -> Tensor:
    """Sum over all tokens of ``fn(x_tile, labels_tile, *weights)`` (a scalar in at least fp32).

    x [B, T, M]; labels [B, T] int64; tile_tokens as in `tiled`. When gradients are wanted, holds the
    gradients of x and of the weights from forward to backward.
    """
    return _TiledLoss.apply(fn, tile_tokens, torch.is_grad_enabled(), x, labels, *weights)
