"""The strategy interface, and what a model tells a strategy.

A strategy gets the hidden state and the model's projections, not q, k and v: Untied Ulysses saves
memory because only a few heads exist at a time. The model describes its attention once, as pure
functions of (activations, weights); a strategy calls them for the heads of a stage, and again in
backward under grad, asking autograd for their gradients. A new model therefore needs no new backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.attention.layout import Layout


@dataclass(frozen=True)
class Weight:
    """A parameter as a projection uses it.

    head_axis: the axis along which it is made of heads (rows of a query projection: 0, columns of
    the output projection: 1), cut to the heads of a stage; None when all heads share it whole.
    """

    tensor: Tensor
    head_axis: int | None = None


@dataclass(frozen=True)
class Product:
    """Of an activation x with a weight of a projection: ``x @ weights[weight].T``.

    is_read: the gradients of what comes after it need its values, as those of a norm do.
    """

    weight: int
    is_read: bool


@dataclass(frozen=True)
class Projection:
    """``fn(activation, *weights)`` with the weights cut to the heads at hand. Pure: no dropout, nothing
    in place, no other tensor that needs a gradient.

    gradients: a function with the gradients of fn, whose output nobody reads; backward runs it in place of
    fn.

    Of a query or key_value, ``fn(x, places, *weights)`` may be told apart further: with ``products``
    ys of x, ``after(*ys, places, *weights)`` is the same. Then backward asks for the gradients of ``after``
    alone, and multiplies itself: no gradient of x is made beside the one that it is added to.
    """

    fn: Callable[..., Tensor | tuple[Tensor, Tensor]]
    weights: tuple[Weight, ...]
    gradients: Callable[..., Tensor | tuple[Tensor, Tensor]] | None = None
    products: tuple[Product, ...] = ()
    after: Callable[..., Tensor | tuple[Tensor, Tensor]] | None = None


@dataclass(frozen=True)
class Projections:
    """A model's attention, for any subset of its heads.

    norm:      fn(h [B,t,M], *w) -> x [B,t,M]
    query:     fn(x [B,t,M], places [B,t,...], *w) -> q [B,t,n,D]
    key_value: fn(x [B,t,M], places [B,t,...], *w) -> k, v [B,t,m,D]
    output:    fn(o [B,t,n,D], *w) -> y [B,t,M], linear in the heads (no bias: it would be added once
               per stage)
    scale:     factor on the scores before softmax; causal: a token sees none after it
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm: Projection
    query: Projection
    key_value: Projection
    output: Projection
    scale: float
    causal: bool = True


@dataclass(frozen=True)
class Peers:
    """Ranks that work together on a row: how many, which one this is, and their process group (None
    for a single rank, or where a strategy is only asked what it can do)."""

    ranks: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None


ALONE = Peers()


@dataclass(frozen=True)
class AttentionShape:
    """Whole numbers that decide whether a strategy can do a job."""

    n_heads: int
    n_kv_heads: int
    head_dim: int


class Strategy(Protocol):
    """How attention is spread over the ranks that share a row."""

    name: str
    layout: Layout

    def check(self, shape: AttentionShape) -> None:
        """Raise ValueError, with every number and the fix, when the strategy cannot do ``shape``.
        Needs no process group."""

    def attend(
        self,
        h: Tensor,
        places: Tensor,
        projections: Projections,
        documents: Documents | None = None,
    ) -> Tensor:
        """h + output(attention(query, key, value of norm(h))): [B, T, M] -> [B, T, M].

        places [B, T, ...]: what the projections take of each of this rank's tokens beside x: positions, or
        what rope makes of them. No gradient. documents: those of the whole rows, the same on all
        ranks; None where every row is one. Collective over the strategy's ranks, forward and backward.
        """

    def kept_bytes(self, shape: AttentionShape, rows: int, tokens: int, itemsize: int) -> int:
        """Bytes that one `attend` of ``rows`` x ``tokens`` of this rank keeps for backward, beside h."""

    def describe(self, shape: AttentionShape) -> str:
        """One line for the log: what is exchanged at each stage."""
