"""What the token-wise work of a model costs, asked of its own functions on the meta device.

    a tile of tokens -> norm, projections, MLP half, loss, forward and backward   -> a Cost of each

Nothing is written down twice here: a change of ops/, of a model's functions or of a tile's size changes the
answer, and so the plan. Each is run for two tiles where a job has more than one, because what the
first leaves behind is alive during the second. Compiled, the same code calls stand-ins that hold the
buffers of inductor's kernels (fused.py): only the peak is theirs, the rest of a Cost is that of the functions
as they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchtitan_lc.attention.base import Projection, Projections
from torchtitan_lc.attention.bound import add_all, add_input_gradients
from torchtitan_lc.attention.buffers import Tiles
from torchtitan_lc.attention.heads import HeadPlan, Heads
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.ops.loss import tiled_loss
from torchtitan_lc.ops.tiled import GradSum, leaf, sum_dtype, tiled, vjp
from torchtitan_lc.plan.fused import fused
from torchtitan_lc.tools.meter import Cost, Meter


@dataclass(frozen=True)
class TileShape:
    """A tile of ``tokens`` tokens of each of ``rows`` rows, activations of ``width`` in ``dtype``.
    repeats: 2 where a rank's tokens make several, else 1."""

    rows: int
    tokens: int
    width: int
    dtype: torch.dtype
    repeats: int

    @property
    def tokens_of_all_rows(self) -> int:
        return self.rows * self.tokens

    def hidden(self, tiles: int = 1) -> Tensor:
        size = (self.rows, self.tokens * tiles, self.width)
        return torch.empty(size, dtype=self.dtype, device="meta")

    def heads(self, count: int, head_dim: int) -> Tensor:
        size = (self.rows, self.tokens, count, head_dim)
        return torch.empty(size, dtype=self.dtype, device="meta")

    def places(self, width: int) -> Tensor:
        """What a decoder hands to its projections beside activations."""
        size = (self.rows, self.tokens, width)
        return torch.empty(size, dtype=sum_dtype(self.dtype), device="meta")

    def integers(self, tiles: int = 1) -> Tensor:
        return torch.empty((self.rows, self.tokens * tiles), dtype=torch.int64, device="meta")


@dataclass(frozen=True)
class ProjectionCosts:
    """Of one tile, for the heads of one stage (output: of all stages); each as projecting.py calls it."""

    query: Cost
    key_value: Cost
    output: Cost
    output_backward: Cost
    query_backward: Cost
    key_value_backward: Cost
    norm: Cost
    norm_backward: Cost

    def tiles(self) -> Tiles:
        """The bytes of each, as attention/buffers/ takes them."""
        return Tiles(**{f.name: getattr(self, f.name).peak for f in fields(self)})


def projection_costs(
    projections: Projections,
    plan: HeadPlan,
    shape: TileShape,
    holds_normed_input: bool,
    places_width: int,
    compiled: bool,
) -> ProjectionCosts:
    """For the widest stage of ``plan``. places_width: numbers that rope gives the projections per token."""
    case = plan, shape, holds_normed_input, places_width
    costs = _ProjectedTile(projections, *case).costs()
    if not compiled:
        return costs
    held = _ProjectedTile(_compiled(projections), *case).costs()
    peaks = {f.name: getattr(held, f.name).peak for f in fields(held)}
    return ProjectionCosts(
        **{name: replace(getattr(costs, name), peak=peak) for name, peak in peaks.items()}
    )


def _compiled(projections: Projections) -> Projections:
    parts = {name: getattr(projections, name) for name in ("norm", "query", "key_value", "output")}
    return replace(
        projections,
        **{
            name: replace(
                part,
                fn=fused(part.fn),
                gradients=fused(part.gradients or part.fn),
                after=fused(part.after) if part.after else None,
            )
            for name, part in parts.items()
        },
    )


class _ProjectedTile:
    """One tile's activations and weights, and the calls of projecting.py on them."""

    def __init__(
        self,
        projections: Projections,
        plan: HeadPlan,
        shape: TileShape,
        holds_normed_input: bool,
        places_width: int,
    ) -> None:
        self.p, self.shape, self.holds_normed_input = projections, shape, holds_normed_input
        # A part of a longer one, as tiles are: of several rows it is no matrix, and products copy it.
        self.h = shape.hidden(shape.repeats)[:, : shape.tokens]
        self.places = shape.places(places_width)
        self.q_heads = max((stage.all_q_heads for stage in plan.stages), key=len)
        self.received = max((stage.all_kv_heads for stage in plan.stages), key=len)
        self.kv_heads = tuple(sorted(set(self.received)))
        self.norm_weights = self._cut(self.p.norm, (), 1)

    def costs(self) -> ProjectionCosts:
        p, shape = self.p, self.shape
        query = self._cut(p.query, self.q_heads, p.n_heads)
        key_value = self._cut(p.key_value, self.kv_heads, p.n_kv_heads)
        output = self._cut(p.output, self.q_heads, p.n_heads)
        all_output = self._cut(p.output, tuple(range(p.n_heads)), p.n_heads)
        return ProjectionCosts(
            query=self._project(p.query, query),
            key_value=self._project(p.key_value, key_value),
            output=_cost(lambda: self._add_outputs(all_output), shape.repeats),
            output_backward=self._output_backward(output),
            query_backward=self._projection_backward(p.query, query),
            key_value_backward=self._projection_backward(p.key_value, key_value),
            norm=_cost(lambda: p.norm.fn(self.h, *self.norm_weights), shape.repeats),
            norm_backward=_cost(self._norm_backward, shape.repeats),
        )

    # -- weights and inputs

    def _cut(self, part: Projection, heads: Heads, n_heads: int) -> list[Tensor]:
        """New tensors of the size of the weights of ``heads``."""
        found = []
        for weight in part.weights:
            size = list(weight.tensor.shape)
            if weight.head_axis is not None:
                size[weight.head_axis] = size[weight.head_axis] // n_heads * len(heads)
            found.append(self.h.new_empty(size))
        return found

    def _normed(self) -> Any:
        return self.h if self.holds_normed_input else self.p.norm.fn(self.h, *self.norm_weights)

    # -- forward

    def _project(self, part: Projection, weights: list[Tensor]) -> Cost:
        with Meter() as meter:
            for _ in range(
                self.shape.repeats
            ):  # variables hold a tile's until they hold the next one's
                x = self._normed()
                tiles = part.fn(x, self.places, *weights)
                self._replicate(tiles)
            return _share(meter.cost, self.shape.repeats)

    def _replicate(self, tiles: Any) -> None:
        """A KV head for each rank that needs it, of k and then of v, as projecting.py makes them."""
        received, different = len(self.received), len(self.kv_heads)
        if isinstance(tiles, tuple) and received != different:
            for tile in tiles:
                torch.cat([tile] * -(-received // different), dim=2)

    def _add_outputs(self, weights: list[Tensor]) -> Any:
        p = self.p
        joined = torch.cat([self.shape.heads(1, p.head_dim)] * p.n_heads, dim=2)
        y: Any = p.output.fn(joined, *weights)
        del joined
        return y, torch.add(self.h, y, out=y)

    # -- backward

    def _output_backward(self, weights: list[Tensor]) -> Cost:
        """vjp of a tile, whose gradient is a view of the block's, and the sums of its weights' gradients."""
        part, leaves = self.p.output, [leaf(w) for w in weights]
        sums = [GradSum(w) for w in leaves]
        with Meter() as meter:
            # A tile's tensors give way one by one to those of the next.
            for _ in range(self.shape.repeats):
                tile = leaf(self.shape.heads(len(self.q_heads), self.p.head_dim))
                found = vjp(part.gradients or part.fn, [tile, *leaves], [self.h])
                add_all(sums, found[1:])
            return _of_a_tile(meter.cost, self.shape)

    def _projection_backward(self, part: Projection, weights: list[Tensor]) -> Cost:
        """Of a query or key_value: gradients are read head by head, those of the normed input added."""
        leaves, dx = [leaf(w) for w in weights], self.shape.hidden()
        sums = [GradSum(w) for w in leaves]
        with Meter():
            like = part.fn(self.h, self.places, *weights)
        outputs = like if isinstance(like, tuple) else (like,)
        with Meter() as meter:
            for _ in range(self.shape.repeats):
                x = self._normed()
                given = [torch.empty_like(y) for y in outputs]
                add_input_gradients(part, x, self.places, leaves, given, dx, sums)
            return _of_a_tile(meter.cost, self.shape)

    def _norm_backward(self) -> Any:
        return vjp(self.p.norm.fn, [leaf(self.h), *map(leaf, self.norm_weights)], [self.h])


def rope_bytes(model: Decoder, dtype: torch.dtype) -> int:
    """Of one token."""
    with Meter():
        one = torch.empty((1, 1), dtype=torch.int64, device="meta")
        made = model.functions.rope.cos_sin(one, sum_dtype(dtype))
    return made.numel() * made.element_size()


def mlp_costs(
    fn: Callable[..., Tensor],
    gradients: Callable[..., Tensor],
    weights: Sequence[Tensor],
    shape: TileShape,
    compiled: bool,
) -> tuple[Cost, Cost]:
    """(forward, backward) of `ops.tiled`: without the full-size buffers that go in and come out, with the
    sums of the weights' gradients."""
    costs = _mlp_costs(fn, gradients, weights, shape)
    if not compiled:
        return costs
    return _with_peaks(costs, _mlp_costs(fused(fn), fused(gradients), weights, shape))


def _mlp_costs(
    fn: Callable[..., Tensor],
    gradients: Callable[..., Tensor],
    weights: Sequence[Tensor],
    shape: TileShape,
) -> tuple[Cost, Cost]:
    leaves = [leaf(w.to(shape.dtype)) for w in weights]
    x = leaf(shape.hidden(shape.repeats))
    dy = torch.empty_like(x)
    run = partial(tiled, fn, x, *leaves, tile_tokens=shape.tokens_of_all_rows, gradients=gradients)
    with Meter() as meter:
        y = run()
        forward = meter.cost
        del y
    with Meter() as meter:
        torch.autograd.grad(run(skip_output=True), [x, *leaves], dy)
        backward = meter.cost
    return _of_a_tile(forward, shape, x), _of_a_tile(backward, shape, x)


def loss_costs(
    fn: Callable[..., Tensor], weights: Sequence[Tensor], shape: TileShape, compiled: bool
) -> tuple[Cost, Cost]:
    """(forward, backward) of `ops.tiled_loss`, likewise: forward makes the gradients, backward scales
    them and holds both."""
    costs = _loss_costs(fn, weights, shape)
    return _with_peaks(costs, _loss_costs(fused(fn), weights, shape)) if compiled else costs


def _loss_costs(
    fn: Callable[..., Tensor], weights: Sequence[Tensor], shape: TileShape
) -> tuple[Cost, Cost]:
    leaves = [leaf(w.to(shape.dtype)) for w in weights]
    x, labels = leaf(shape.hidden(shape.repeats)), shape.integers(shape.repeats)
    with Meter() as meter:
        loss = tiled_loss(fn, x, labels, *leaves, tile_tokens=shape.tokens_of_all_rows)
        forward = meter.cost
        meter.restart()
        torch.autograd.grad(loss, [x, *leaves])
        backward = meter.cost
    return _of_a_tile(forward, shape, x), _of_a_tile(backward, shape, x, x)


def _with_peaks(costs: tuple[Cost, Cost], held: tuple[Cost, Cost]) -> tuple[Cost, Cost]:
    forward, backward = (replace(c, peak=h.peak) for c, h in zip(costs, held, strict=True))
    return forward, backward


def _cost(body: Callable[[], Any], repeats: int) -> Cost:
    """Of one of ``repeats`` rounds of a loop; ``body`` returns what its variables go on to hold."""
    with Meter() as meter:
        held = None
        for _ in range(repeats):
            held = body()
        del held
    return _share(meter.cost, repeats)


def _of_a_tile(cost: Cost, shape: TileShape, *whole: Tensor) -> Cost:
    """One tile's share of a function that ran over all, without the bytes of ``whole`` tensors."""
    peak = cost.peak - sum(x.numel() * x.element_size() for x in whole)
    return _share(replace(cost, peak=peak), shape.repeats)


def _share(cost: Cost, repeats: int) -> Cost:
    return replace(
        cost,
        flops=cost.flops // repeats,
        traffic=cost.traffic // repeats,
        calls=-(-cost.calls // repeats),
    )
