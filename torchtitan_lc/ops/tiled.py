"""Run a function of tokens in tiles, forward and backward, so that its inner activations exist for one
tile at a time (ALST's tiling, arXiv 2506.13996).

    x [B, T, M] -> y [B, T, N],   y[:, rows] = fn(x[:, rows], *weights)   for each tile of rows

Backward recomputes a tile under grad and asks autograd for its gradients; where that takes less than the
output did, it is told so by another function with the same gradients. Weight gradients of the tiles
are summed in at least fp32 and handed out once, whole: under FSDP2 a unit is gathered once and reduced
once per backward, however many tiles there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def tile_slices(tokens: int, tile_tokens: int, batch: int = 1) -> Iterator[tuple[int, int]]:
    """(start, stop) over ``tokens``; a tile holds about ``tile_tokens`` tokens of all ``batch`` rows
    together, at least one of each; 0 means a single tile."""
    step = max(1, tile_tokens // batch) if tile_tokens > 0 else max(1, tokens)
    for start in range(0, tokens, step):
        yield start, min(start + step, tokens)


class GradSum:
    """Gradient of one weight, summed over tiles in at least fp32."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.total: Tensor | None = None

    def add(self, grad: Tensor | None) -> None:
        if grad is None:
            return
        if self.total is None:
            self.total = grad.to(sum_dtype(grad.dtype), copy=True)
        else:
            self.total += grad

    def result(self) -> Tensor:
        """The sum in the weight's dtype; zeros when no tile contributed."""
        if self.total is None:
            return torch.zeros_like(self.weight)
        return self.total.to(self.weight.dtype)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which many terms of ``dtype`` are summed."""
    return torch.promote_types(dtype, torch.float32)


def leaf(x: Tensor, requires_grad: bool = True) -> Tensor:
    return x.detach().requires_grad_(requires_grad)


def vjp(
    fn: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients of ``fn(*inputs)`` (a tensor or tuple of tensors) for the output gradients ``grads``,
    one per input that requires grad, None for the others."""
    with torch.enable_grad():
        outputs = fn(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [x for x in inputs if x.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, list(grads), allow_unused=True))
    return [next(found) if x.requires_grad else None for x in inputs]


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fn: Callable[..., Tensor],
        gradients: Callable[..., Tensor],
        tile_tokens: int,
        skip_output: bool,
        gradient_over_input: bool,
        x: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.gradients, ctx.tile_tokens = gradients, tile_tokens
        ctx.gradient_over_input = gradient_over_input
        ctx.save_for_backward(x, *weights)
        if skip_output:
            return x.new_zeros(()).expand(x.shape)
        y: Tensor | None = None
        for start, stop in tile_slices(x.shape[1], tile_tokens, x.shape[0]):
            part = fn(x[:, start:stop], *weights)
            if y is None:
                y = part.new_empty(*x.shape[:2], *part.shape[2:])
            y[:, start:stop] = part
        assert y is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, *needs_weights = ctx.needs_input_grad[5:]
        leaves = [leaf(w, need) for w, need in zip(weights, needs_weights, strict=True)]
        sums = [GradSum(w) for w in weights]
        dx: Tensor | None = None
        if needs_x and ctx.gradient_over_input:
            dx = x  # a tile's rows are read before its gradient is written there
        elif needs_x:
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        for start, stop in tile_slices(x.shape[1], ctx.tile_tokens, x.shape[0]):
            x_tile = leaf(x[:, start:stop], needs_x)
            dx_tile, *dweights = vjp(ctx.gradients, [x_tile, *leaves], [dy[:, start:stop]])
            if dx is not None:
                dx[:, start:stop] = 0 if dx_tile is None else dx_tile
            for total, grad in zip(sums, dweights, strict=True):
                total.add(grad)
        dws = [s.result() if need else None for s, need in zip(sums, needs_weights, strict=True)]
        return (None, None, None, None, None, dx, *dws)


def tiled(
    fn: Callable[..., Tensor],
    x: Tensor,
    *weights: Tensor,
    tile_tokens: int,
    gradients: Callable[..., Tensor] | None = None,
    skip_output: bool = False,
    gradient_over_input: bool = False,
) -> Tensor:
    """``fn(x, *weights)`` by tiles over dimension 1 of ``x`` [B, T, ...].

    fn: pure and token-wise: a row of its output depends on the same row of ``x`` and on the weights.
    weights: every tensor that needs a gradient; fn must not reach for others.
    tile_tokens: tokens per tile, all rows together; 0 for one tile.
    gradients: a function with the gradients of fn, whose output nobody reads; what backward runs in its
        place.
    skip_output: return zeros of the shape of ``x`` instead of computing: only for a recomputation,
        where the output is not read but the inputs have to be saved again.
    gradient_over_input: backward may write the gradient of ``x`` over it: only for an ``x`` that is
        recomputed for this backward and read by nothing else.

    Keeps only ``x`` and the weights for backward.
    """
    return _Tiled.apply(
        fn, gradients or fn, tile_tokens, skip_output, gradient_over_input, x, *weights
    )
