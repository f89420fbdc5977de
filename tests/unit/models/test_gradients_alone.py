"""Functions that backward runs again for their gradients alone: the same gradients, without the products that
only the output would need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.tiny import FLAVORS, masked_rows
from torchtitan_lc.attention.base import ALONE
from torchtitan_lc.attention.kernels import CpuFlash
from torchtitan_lc.attention.upipe import UPipe
from torchtitan_lc.memory.checkpointing import Mode, checkpoint_block
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.functions import RECOMPUTED, Functions
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.ops.norm import rms_norm
from torchtitan_lc.ops.tiled import leaf, vjp

ARGS = dataclasses.replace(FLAVORS["gqa"], n_layers=1)
VARIANTS = {
    "llama": ARGS,
    "qwen2": dataclasses.replace(ARGS, qkv_bias=True),
    "qwen3": dataclasses.replace(ARGS, qk_norm=True),
}


def inputs(name: str) -> list[Tensor]:
    """Random activations and weights as ``name`` takes them, with a head less than the model has."""
    random = torch.Generator().manual_seed(0)

    def new(*shape: int) -> Tensor:
        return leaf(torch.randn(*shape, generator=random, dtype=torch.float64))

    dim, width, inner = ARGS.dim, (ARGS.n_heads - 1) * ARGS.head_dim, ARGS.hidden_dim
    if name == "mlp_half":
        return [new(2, 5, dim), new(dim), new(inner, dim), new(dim, inner), new(inner, dim)]
    return [new(2, 5, ARGS.n_heads - 1, ARGS.head_dim), new(dim, width)]


def gradients_by(fn: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    like = fn(*tensors)
    given = torch.randn(like.shape, generator=random, dtype=like.dtype)
    return [grad for grad in vjp(fn, tensors, [given]) if grad is not None]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("name", RECOMPUTED)
def test_the_gradients_are_those_of_the_function(name: str, backend: str | None) -> None:
    plain, f = Functions(ARGS), Functions(ARGS)
    if backend is not None:
        f.compile(backend)
    tensors = inputs(name)
    want = gradients_by(getattr(plain, name), tensors)
    got = gradients_by(getattr(f.gradients, name), tensors)
    assert len(want) == sum(x.requires_grad for x in tensors)
    for x, exact in zip(got, want, strict=True):
        torch.testing.assert_close(x, exact, rtol=1e-12, atol=1e-12)


def in_place(_: Any, a: list[int], b: list[int], **__: Any) -> int:
    """FLOP of an operation that torch's counter does not know."""
    return 2 * a[0] * a[1] * b[1]


def products(mode: Mode, args: Any) -> int:
    """FLOP of the matrix products of one block, forward and backward, for each token."""
    model = Decoder(args)
    model.init_weights(0)
    model.execution.strategy = UPipe(CpuFlash(), ulysses=ALONE, heads_per_stage=3, tile_tokens=8)
    model.execution.mlp_tokens = 8
    (block,) = model.blocks
    block.checkpoint = checkpoint_block(mode)
    rows = masked_rows(1, 32)
    h = torch.randn(1, 32, args.dim, requires_grad=True)
    cos_sin = model.functions.rope.cos_sin(rows["positions"], torch.float32)
    with FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.addmm_: in_place}
    ) as counter:
        block(h, cos_sin, None).sum().backward()
    assert all(p.grad is not None for p in block.parameters())
    counts = counter.get_flop_counts()["Global"]
    ops = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_}
    return sum(n for op, n in counts.items() if op in ops) // 32


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_products_are_those_that_gradients_need(mode: Mode, variant: str) -> None:
    """Of N weights: 2 N forward, 4 N backward, and again what backward reads: q, k and v, the products in
    the MLP, with checkpointing also the hidden state between the halves, and what a norm of heads takes."""
    args = VARIANTS[variant]
    q, kv = args.n_heads * args.head_dim * args.dim, args.n_kv_heads * args.head_dim * args.dim
    w = args.hidden_dim * args.dim
    again = q + 2 * kv + 2 * w
    if mode == "full":
        again += q + 2 * kv  # for attention's forward
    if mode != "none":
        again += q  # the output projection
    if args.qk_norm:
        again += q + kv
    assert products(mode, args) == 6 * (2 * q + 2 * kv + 3 * w) + 2 * again


class PostNorm(Functions):
    """Its own MLP half needs what w2 gives."""

    def mlp_half(self, h: Tensor, scale: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        by = self.linears
        return h + rms_norm(
            by["w2"](F.gelu(by["w1"](h, w1)) * by["w3"](h, w3), w2), scale, self.eps
        )


class MadeOfAnother(Functions):
    """An MLP half that goes on with what `output` gives."""

    def mlp_half(self, h: Tensor, scale: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        heads = h.unflatten(-1, (-1, self.head_dim))
        return super().mlp_half(h, scale, w1, w2, w3) * self.output(heads, w2 @ w1).square()


def changed_here(args: DecoderArgs) -> Functions:
    """An object, not a class, with a part of its own."""
    made = Functions(args)
    made.output = lambda out, wo: F.linear(out.flatten(-2).tanh(), wo).tanh()  # type: ignore[method-assign]
    return made


OWN: list[tuple[Callable[[DecoderArgs], Functions], set[str]]] = [
    (PostNorm, {"mlp_half"}),
    (MadeOfAnother, {"mlp_half"}),
    (changed_here, {"output"}),
]


def flops(fn: Callable[..., Any], tensors: list[Tensor]) -> int:
    with FlopCounterMode(display=False) as counter:
        fn(*tensors)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", RECOMPUTED)
@pytest.mark.parametrize(("make", "own"), OWN)
def test_what_a_model_brings_runs_whole_and_the_rest_does_not(
    make: Callable[[DecoderArgs], Functions], own: set[str], name: str
) -> None:
    f = make(ARGS)
    tensors = inputs(name)
    whole, alone = getattr(f, name), getattr(f.gradients, name)
    want = gradients_by(whole, tensors)
    for x, exact in zip(gradients_by(alone, tensors), want, strict=True):
        torch.testing.assert_close(x, exact, rtol=1e-12, atol=1e-12)
    assert (flops(alone, tensors) == flops(whole, tensors)) == (name in own)


def double(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, 2 * weight, bias)


def test_other_products_are_asked_for_their_gradients_whole() -> None:
    """Float8's, say: which gradients they have is their own affair."""
    f = Functions(ARGS)
    f.compile("aot_eager")
    changed = f.with_linear(double, ["w2"])
    tensors = inputs("mlp_half")
    assert flops(changed.gradients.mlp_half, tensors) == flops(changed.mlp_half, tensors)
    twice = [*tensors[:3], 2 * tensors[3].detach(), tensors[4]]
    torch.testing.assert_close(changed.mlp_half(*tensors), Functions(ARGS).mlp_half(*twice))
    out = inputs("output")
    assert flops(changed.gradients.output, out) == 0 < flops(changed.output, out)
