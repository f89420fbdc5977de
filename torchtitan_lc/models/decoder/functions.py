"""The arithmetic of a layer as pure functions of (activations, weights).

All layers share one `Functions`, so that compiling it compiles the model once. Shapes: rows of tokens
[B, t, ...], where t is whatever tile the caller works on, and weights as torch.nn.Linear keeps them,
cut to n heads.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.ops.linear import Linear, gradients_of
from torchtitan_lc.ops.loss import cross_entropy_sum
from torchtitan_lc.ops.mlp import swiglu
from torchtitan_lc.ops.norm import rms_norm
from torchtitan_lc.ops.rope import Rope

# The products of a block, by their weight's name in it. The head is none of them.
LINEARS = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")


class Functions:
    """linears: what multiplies with each of a block's weights, by the weight's name."""

    def __init__(self, args: DecoderArgs) -> None:
        self.eps, self.head_dim = args.norm_eps, args.head_dim
        self.linear_weights = 2 if args.qkv_bias else 1  # to heads: a matrix, a bias
        self.qk_norm = args.qk_norm
        self.rope = Rope(args.head_dim, args.rope_theta, args.rope_scaling)
        self.linears: dict[str, Linear] = dict.fromkeys(LINEARS, F.linear)

    def with_linear(self, linear: Linear, names: Collection[str]) -> Functions:
        """The same functions, not compiled yet, that multiply with the weights ``names`` by ``linear``."""
        changed = copy.copy(self)
        changed.linears = {**self.linears, **dict.fromkeys(names, linear)}
        changed.__dict__.pop("gradients", None)
        return changed

    @cached_property
    def gradients(self) -> Functions:
        """The same functions for backward, which recomputes them for their gradients alone: products are
        left out where only the output, which nobody reads, would need them.

        That holds for these functions, not for those that a subclass has in their place: they run whole.
        """
        unread = {"wv": "key_value", "wo": "output", "w2": "mlp_half"}
        if not self.qk_norm:  # its gradient needs what is normed
            unread |= {"wq": "query", "wk": "key_value"}
        changed = copy.copy(self)
        changed.linears = {
            name: gradients_of(linear) if self._is_ours(unread.get(name)) else linear
            for name, linear in self.linears.items()
        }
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
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        recomputed = ("query", "key_value", "output", "mlp_half")
        for functions, names in (
            (self.gradients, recomputed),
            (self, (*recomputed, "norm", "loss")),
        ):
            for name in names:
                compiled = torch.compile(getattr(functions, name), backend=backend, dynamic=False)
                setattr(functions, name, compiled)

    def _is_ours(self, function: str | None) -> bool:
        """False where a subclass overrides it, or something that it is made of."""
        if function is None:
            return False
        made_of = (function, "_rotated_heads", "_heads")
        return all(getattr(type(self), name) is getattr(Functions, name) for name in made_of)

    def _rotated_heads(
        self, name: str, x: Tensor, cos_sin: Tensor, weights: tuple[Tensor, ...]
    ) -> Tensor:
        heads = self._heads(self.linears[name](x, *weights[: self.linear_weights]))
        if self.qk_norm:
            heads = rms_norm(heads, weights[-1], self.eps)
        return self.rope.rotate(heads, cos_sin)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # [B, t, n*D] -> [B, t, n, D]
