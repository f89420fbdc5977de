"""A projection with the weights of one call: cut to the heads of a stage, and their gradients put back.

Weights are cut by slices, never by an index tensor, so nothing is copied to the device; the gradients of
all stages are summed in at least fp32 in the place of the whole weight, and handed out once. Those of a tile
are added by functions that a planner calls too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lc.attention.base import Projection
from torchtitan_lc.attention.heads import Heads, runs
from torchtitan_lc.ops.linear import add_gradient_of_input, gradient_of_weight, unread_product
from torchtitan_lc.ops.tiled import GradSum, leaf, sum_dtype, vjp


class BoundProjection:
    """A projection with the weights of this call; cuts them to heads and collects their gradients."""

    def __init__(self, part: Projection, weights: Sequence[Tensor], n_heads: int) -> None:
        self.part = part
        self.fn: Callable[..., Any] = part.fn  # a tensor, or k and v: its caller knows
        self.gradients: Callable[..., Any] = part.gradients or part.fn
        self.weights = weights
        self.axes = [w.head_axis for w in part.weights]
        self.n_heads = n_heads
        self.sums: list[Tensor | None] = [None] * len(weights)
        self.needs_grad: Sequence[bool] = [False] * len(weights)

    def cut(self, heads: Heads) -> list[Tensor]:
        """The weights of ``heads``, in that order; views where the heads are consecutive."""
        return [
            w if axis is None else _join(self._slices(w, axis, heads), axis)
            for w, axis in zip(self.weights, self.axes, strict=True)
        ]

    def leaves(self, heads: Heads) -> list[Tensor]:
        return [leaf(w, need) for w, need in zip(self.cut(heads), self.needs_grad, strict=True)]

    def add_grads(self, heads: Heads, grads: Sequence[GradSum]) -> None:
        """Add the gradients of the cut weights to those of the whole weights (at least fp32)."""
        for i, grad in enumerate(grads):
            if not self.needs_grad[i] or grad.total is None:
                continue
            total = self.sums[i]
            if total is None:
                w = self.weights[i]
                total = self.sums[i] = torch.zeros_like(w, dtype=sum_dtype(w.dtype))
            axis = self.axes[i]
            if axis is None:
                total += grad.total
                continue
            done = 0
            for piece in self._slices(total, axis, heads):
                piece += grad.total.narrow(axis, done, piece.shape[axis])
                done += piece.shape[axis]

    def results(self) -> list[Tensor | None]:
        return [
            None if not need else torch.zeros_like(w) if total is None else total.to(w.dtype)
            for w, total, need in zip(self.weights, self.sums, self.needs_grad, strict=True)
        ]

    def _slices(self, tensor: Tensor, axis: int, heads: Heads) -> list[Tensor]:
        size = tensor.shape[axis] // self.n_heads
        return [tensor.narrow(axis, first * size, count * size) for first, count in runs(heads)]


def add_input_gradients(
    part: Projection,
    x: Tensor,
    places: Tensor,
    leaves: Sequence[Tensor],
    grads: Sequence[Tensor],
    dx: Tensor,
    sums: Sequence[GradSum],
) -> None:
    """Add to ``dx`` (of a tile's x) and ``sums`` (of ``leaves``, the weights, as far as they require grad)
    the gradients of a query or key_value projection of x, for those of its outputs."""
    if not part.products:
        dx_tile, _, *dweights = vjp(part.gradients or part.fn, [leaf(x), places, *leaves], grads)
        assert dx_tile is not None
        dx += dx_tile
        add_all(sums, dweights)
        return
    assert part.after is not None
    weights = list(leaves)
    for product in part.products:
        weights[product.weight] = leaves[product.weight].detach()
    ys = []
    for product in part.products:
        multiply = F.linear if product.is_read else unread_product
        ys.append(leaf(multiply(x, weights[product.weight])))
    found = vjp(part.after, [*ys, places, *weights], grads)
    dys = [dy for dy in found[: len(ys)] if dy is not None]
    factors = [weights[product.weight] for product in part.products]
    # One product for all: dx is as large as what is added, and each sum into it is rounded.
    add_gradient_of_input(dx, _join(dys, -1), _join(factors, 0))
    for product, dy in zip(part.products, dys, strict=True):
        if leaves[product.weight].requires_grad:
            sums[product.weight].add(gradient_of_weight(dy, x))
    add_all(sums, found[len(ys) + 1 :])


def add_all(sums: Sequence[GradSum], grads: Sequence[Tensor | None]) -> None:
    for total, grad in zip(sums, grads, strict=True):
        total.add(grad)


def _join(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)
