"""The arithmetic of a layer as pure functions of (activations, weights).

All layers share one `Functions`, so that compiling it compiles the model once. Shapes: rows of tokens
[B, t, ...], where t is whatever tile the caller works on, and weights as torch.nn.Linear keeps them,
cut to n heads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from functools import cached_property, wraps
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lc.attention.base import Product
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.ops.linear import Linear, gradients_of
from torchtitan_lc.ops.loss import cross_entropy_sum
from torchtitan_lc.ops.mlp import swiglu
from torchtitan_lc.ops.norm import rms_norm
from torchtitan_lc.ops.rope import Rope

# The products of a block, by their weight's name in it. The head is none of them.
LINEARS = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")

# The functions that backward runs again for their gradients, but for an output that nobody reads.
RECOMPUTED = ("output", "mlp_half")

# Beside them, the functions that work on tiles.
_OTHERS = ("query", "key_value", "after_query", "after_key_value", "norm", "loss")

# Of one of them, at most: tiles of several sizes, heads of several stages.
_COMPILATIONS = 64


class Functions:
    """linears: what multiplies with each of a block's weights, by the weight's name."""

    def __init__(self, args: DecoderArgs) -> None:
        self.eps, self.head_dim = args.norm_eps, args.head_dim
        self.linear_weights = 2 if args.qkv_bias else 1  # to heads: a matrix, a bias
        self.qk_norm = args.qk_norm
        self.rope = Rope(args.head_dim, args.rope_theta, args.rope_scaling)
        self.linears: dict[str, Linear] = dict.fromkeys(LINEARS, F.linear)
        self._wrapped: dict[str, Callable[..., Any]] = {}  # what was there before

    def with_linear(self, linear: Linear, names: Collection[str]) -> Functions:
        """The same functions, not compiled, that multiply with the weights ``names`` by ``linear``."""
        changed = self._uncompiled()
        changed.linears = {**self.linears, **dict.fromkeys(names, linear)}
        return changed

    @cached_property
    def gradients(self) -> Functions:
        """The same functions for backward, which recomputes them for their gradients alone: products are
        left out whose output nobody reads. Made at first use: what is changed here later is not seen there.

        That holds for these functions, not for those that a subclass has in their place: they run whole.
        """
        changed = self._uncompiled()
        unread = self._unread_products()
        for function in RECOMPUTED:
            alone = self._uncompiled()  # each its own: a subclass may make one of another
            replaced = {name: gradients_of(self.linears[name]) for name in unread.get(function, ())}
            alone.linears = {**self.linears, **replaced}
            setattr(changed, function, getattr(alone, function))
        return changed

    def _unread_products(self) -> dict[str, tuple[str, ...]]:
        """By function, the weights whose products its gradients don't need."""
        found = {"output": ("wo",), "mlp_half": ("w2",)}
        return {function: names for function, names in found.items() if self._is_ours(function)}

    def products(self, function: str) -> tuple[Product, ...]:
        """Those that "query" or "key_value" begins with, and `after_query` or `after_key_value` goes on from.

        There are none where any part of it is not ours: backward then runs the function whole.
        """
        names = ("wq",) if function == "query" else ("wk", "wv")
        parts = (function, f"after_{function}", "_rotated_heads", "_rotated", "_heads")
        ours = type(self.rope) is Rope and all(self._is_ours(part) for part in parts)
        if not ours or any(self.linears[name] is not F.linear for name in names):
            return ()
        first = Product(0, is_read=self.qk_norm)  # a norm's gradient needs what is normed
        if function == "query":
            return (first,)
        return first, Product(self.linear_weights + self.qk_norm, is_read=False)

    def _is_ours(self, name: str) -> bool:
        """False where a subclass or this object has another; compiled, it is still what it was."""
        fn = self._wrapped.get(name, getattr(self, name))
        return bool(fn == MethodType(getattr(Functions, name), self))

    def _uncompiled(self) -> Functions:
        changed = copy.copy(self)
        for name in ("gradients", *self._wrapped):
            vars(changed).pop(name, None)
        changed._wrapped = {}
        return changed

    def norm(self, h: Tensor, scale: Tensor) -> Tensor:
        return rms_norm(h, scale, self.eps)

    def query(self, x: Tensor, cos_sin: Tensor, *weights: Tensor) -> Tensor:
        """weights: the matrix, then the bias and the norm's scale where the model has them."""
        return self._rotated_heads("wq", x, cos_sin, weights)

    def key_value(self, x: Tensor, cos_sin: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        """weights: those of the key as `query` takes them, then the value's matrix and bias."""
        of_value = len(weights) - self.linear_weights
        k = self._rotated_heads("wk", x, cos_sin, weights[:of_value])
        return k, self._heads(self.linears["wv"](x, *weights[of_value:]))

    def after_query(self, q: Tensor, cos_sin: Tensor, *weights: Tensor) -> Tensor:
        """`query` from its product q [B, t, n*D] on."""
        return self._rotated(_biased(q, weights[1 : self.linear_weights]), cos_sin, weights)

    def after_key_value(
        self, k: Tensor, v: Tensor, cos_sin: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`key_value` from its products on."""
        of_value = len(weights) - self.linear_weights
        k = _biased(k, weights[1 : self.linear_weights])
        v = _biased(v, weights[of_value + 1 :])
        return self._rotated(k, cos_sin, weights[:of_value]), self._heads(v)

    def output(self, out: Tensor, wo: Tensor) -> Tensor:
        return self.linears["wo"](out.flatten(-2), wo)

    def mlp_half(self, h: Tensor, scale: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        linears = self.linears["w1"], self.linears["w2"], self.linears["w3"]
        return h + swiglu(rms_norm(h, scale, self.eps), w1, w2, w3, linears)

    def logits(self, h: Tensor, scale: Tensor, table: Tensor) -> Tensor:
        return F.linear(rms_norm(h, scale, self.eps), table)

    def loss(self, h: Tensor, labels: Tensor, scale: Tensor, table: Tensor) -> Tensor:
        return cross_entropy_sum(self.logits(h, scale, table), labels)

    def compile(self, backend: str) -> None:
        """Replace the functions that work on tiles by compiled equals (shapes static: tiles repeat).

        Each is compiled anew for every size of tile and number of heads that occurs: a handful, but
        more than the 8 after which torch would go on uncompiled without a word.
        """

        def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
            run = torch.compile(fn, backend=backend, dynamic=False)

            @wraps(fn)
            def call(*tensors: Tensor) -> Any:
                _allow_recompiles()
                return run(*tensors)

            return call

        self.wrap(compiled)

    def wrap(self, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put ``by`` of each function that works on tiles in its place, in `gradients` too."""
        for functions, names in ((self.gradients, RECOMPUTED), (self, (*RECOMPUTED, *_OTHERS))):
            functions._wrapped = {name: getattr(functions, name) for name in names}
            for name, fn in functions._wrapped.items():
                setattr(functions, name, by(fn))

    def _rotated_heads(
        self, name: str, x: Tensor, cos_sin: Tensor, weights: tuple[Tensor, ...]
    ) -> Tensor:
        y = self.linears[name](x, *weights[: self.linear_weights])
        return self._rotated(y, cos_sin, weights)

    def _rotated(self, x: Tensor, cos_sin: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        heads = self._heads(x)
        if self.qk_norm:
            heads = rms_norm(heads, weights[-1], self.eps)
        return self.rope.rotate(heads, cos_sin)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # [B, t, n*D] -> [B, t, n, D]


def _allow_recompiles() -> None:
    """In this thread: since torch 2.12 each has settings of its own, and autograd runs a GPU's backward in
    another one."""
    settings = torch._dynamo.config
    if not settings.fail_on_recompile_limit_hit:
        settings.recompile_limit = max(settings.recompile_limit, _COMPILATIONS)
        settings.fail_on_recompile_limit_hit = True


def _biased(x: Tensor, bias: tuple[Tensor, ...]) -> Tensor:
    """bias: one, or none."""
    return x + bias[0] if bias else x
