"""Matrix products of an activation with a weight: torch's own, or through float8 by torchao.

    y [..., N] = x [..., K] weight[N, K]^T + bias[N]

Float8 training (Micikevicius et al., arXiv 2209.05433) casts both factors of a product, here with scales
made anew from the values at hand, and multiplies on tensor cores that are twice as fast as in bf16. The
two products of backward do the same with the gradient.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# linear(x, weight) or linear(x, weight, bias)
Linear = Callable[..., Tensor]


class _GradientsOfLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Of x, so that a compiler does not leave all that x is made of to the backward graph, where it would
        # make x and its gradient in one kernel, with all of their buffers at once. No view of x: for that the
        # compiler would take the gradient of a view.
        return x[..., :1].clone().expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        dx = dy @ weight if needs_x else None
        return dx, gradient_of_weight(dy, x) if needs_weight else None


def _linear_gradients(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y: Tensor = _GradientsOfLinear.apply(x, weight)
    return y if bias is None else y + bias


def gradients_of(linear: Linear) -> Linear:
    """``linear`` for a recomputation whose output nobody reads: the same gradients, and for ``F.linear`` no
    product; what comes out is of the right shape and means nothing."""
    return _linear_gradients if linear is F.linear else linear


def unread_product(x: Tensor, weight: Tensor) -> Tensor:
    """``F.linear(x, weight)`` where its gradient alone is asked for: the shape is right, the values mean
    nothing, and there is no memory behind it and no kernel."""
    return x[(slice(1),) * x.dim()].expand(*x.shape[:-1], weight.shape[0])


def add_gradient_of_input(dx: Tensor, dy: Tensor, weight: Tensor) -> None:
    """Add to ``dx`` [B, t, M], a part of a tensor perhaps, the gradient of x, of y = x weight^T.

    The product itself adds: rounded once, and without a tensor of the size of dx beside it.
    """
    for row, of_y in zip(dx, dy, strict=True):  # together they are no matrix where dx is a part
        row.addmm_(of_y, weight)


def gradient_of_weight(dy: Tensor, x: Tensor) -> Tensor:
    return dy.flatten(0, -2).t() @ x.flatten(0, -2)


MULTIPLE = 16  # a side of a float8 product in bytes, as the tensor cores' kernels read it
_CAPABILITY = (8, 9)  # Ada, the first with float8 tensor cores


class Float8Linear:
    """``F.linear`` with float8 products, forward and backward; what comes out has the dtype of ``x``.

    recipe: a name of torchao.float8.Float8LinearRecipeName. emulate: multiply the rounded values in fp32,
    on any device. x, weight, bias: bf16 or, emulated, fp32; K and N multiples of 16. Each call scales
    by what it is given: under "tensorwise" one scale per tensor, else one per row.
    """

    def __init__(self, recipe: str, emulate: bool) -> None:
        # torchao's modules keep their weights; here they are arguments, so this is what those call.
        from torchao.float8 import Float8LinearConfig, LinearMMConfig, ScaledMMConfig
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        config = Float8LinearConfig.from_recipe_name(recipe)
        self._config = dataclasses.replace(config, emulate=emulate)
        products = (
            config.gemm_config_output,
            config.gemm_config_grad_input,
            config.gemm_config_grad_weight,
        )
        self._products = LinearMMConfig(
            *(
                ScaledMMConfig(emulate=emulate, use_fast_accum=product.use_fast_accum)
                for product in products
            )
        )
        self._matmul: Any = matmul_with_hp_or_float8_args

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.flatten(0, -2)
        # The weight's gradient is a sum over rows: theirs is the side that a last tile makes odd.
        # Rows of zeros add nothing to it, and change no scale.
        missing = -rows.shape[0] % MULTIPLE
        if missing:
            rows = F.pad(rows, (0, 0, 0, missing))
        y = self._matmul.apply(rows, weight.t(), self._products, self._config)
        y = y[: y.shape[0] - missing].unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias


def float8_missing(device_type: str, emulate: bool) -> list[str]:
    """What keeps `Float8Linear` from running in this process, a text for each; imports nothing."""
    problems = []
    if importlib.util.find_spec("torchao") is None:
        problems.append(
            "float8.enable = true needs the package torchao, which is not installed: "
            "pip install -e '.[float8]' in the checkout"
        )
    if emulate:
        return problems
    need = "float8 products need a CUDA GPU of compute capability 8.9 (Ada, Hopper) or above"
    if device_type != "cuda":
        problems.append(
            f"float8.enable = true on {device_type}: {need}; float8.emulate = true rounds like them "
            "anywhere, slowly"
        )
        return problems
    if not torch.cuda.is_available():
        return problems  # asked on another machine than the job's
    capability = torch.cuda.get_device_capability()
    if capability < _CAPABILITY:
        problems.append(
            f"float8.enable = true: {need}, and this one has {capability[0]}.{capability[1]}; set it "
            "to false (float8.emulate = true rounds alike, slowly)"
        )
    return problems
