"""Backward of the query, key and value projections: as autograd has it, whoever multiplies, and no more than it
needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tiny import FLAVORS
from torchtitan_lc.attention.base import ALONE, Projection
from torchtitan_lc.attention.bound import add_input_gradients
from torchtitan_lc.attention.kernels import Math
from torchtitan_lc.attention.upipe import UPipe
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.functions import Functions
from torchtitan_lc.models.decoder.model import Attention
from torchtitan_lc.ops.rope import Rope
from torchtitan_lc.ops.tiled import GradSum, leaf
from torchtitan_lc.tools.meter import Cost, Meter

ARGS = dataclasses.replace(FLAVORS["gqa"], n_layers=1)
VARIANTS = {
    "llama": ARGS,
    "qwen2": dataclasses.replace(ARGS, qkv_bias=True),
    "qwen3": dataclasses.replace(ARGS, qk_norm=True),
    "both": dataclasses.replace(ARGS, qkv_bias=True, qk_norm=True),
}


class AnothersWeight(Functions):
    """A query that multiplies as the key does, and goes on."""

    def query(self, x: Tensor, cos_sin: Tensor, *weights: Tensor) -> Tensor:
        return super().query(x, cos_sin, *weights) * self._heads(self.linears["wk"](x, *weights))


class ScaledHeads(Functions):
    """A part of `query` and `key_value` of its own, which is not linear."""

    def _heads(self, x: Tensor) -> Tensor:
        return super()._heads(x).tanh()


class ScaledProduct(Functions):
    def _rotated_heads(
        self, name: str, x: Tensor, cos_sin: Tensor, weights: tuple[Tensor, ...]
    ) -> Tensor:
        return super()._rotated_heads(name, x.tanh(), cos_sin, weights)


class NormalisingRope(Rope):
    def rotate(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        return F.normalize(super().rotate(x, cos_sin), dim=-1)


class OwnRope(Functions):
    def __init__(self, args: DecoderArgs) -> None:
        super().__init__(args)
        self.rope = NormalisingRope(args.head_dim, args.rope_theta, args.rope_scaling)


def changed_here(args: DecoderArgs) -> Functions:
    """An object, not a class, with a part of its own."""
    made = Functions(args)
    query = made.query
    made.query = lambda x, *others: query(x.tanh(), *others)  # type: ignore[method-assign]
    return made


def of_another(args: DecoderArgs) -> Functions:
    """A part of an object that has other arguments."""
    made = Functions(args)
    made.query = OwnRope(args).query  # type: ignore[method-assign]
    return made


def another_linear(args: DecoderArgs) -> Functions:
    def double(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, 2 * weight, bias)

    return Functions(args).with_linear(double, ["wv"])


BOTH = {"query", "key_value"}
# What makes functions, and those that run whole.
OWN: list[tuple[Callable[[DecoderArgs], Functions], set[str]]] = [
    (Functions, set()),
    (AnothersWeight, {"query"}),
    (ScaledHeads, BOTH),
    (ScaledProduct, BOTH),
    (OwnRope, BOTH),
    (changed_here, {"query"}),
    (of_another, {"query"}),
    (another_linear, {"key_value"}),
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("make", "own"), OWN)
def test_a_projection_is_told_apart_where_all_of_it_is_known(
    make: Callable[[DecoderArgs], Functions], own: set[str], compiled: bool
) -> None:
    f = make(ARGS)
    if compiled:
        f.wrap(lambda fn: lambda *inputs: fn(*inputs))
    assert {name for name in BOTH if not f.products(name)} == own


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64) * 0.5


def attention_of(f: Functions, args: DecoderArgs) -> tuple[Attention, Tensor]:
    """Of random weights, with the scale of the norm before it."""
    torch.manual_seed(0)
    attention = Attention(args, f).double()
    with torch.no_grad():
        for p in attention.parameters():
            p.copy_(random(*p.shape))
    return attention, random(args.dim).requires_grad_()


def by_autograd(attention: Attention, scale: Tensor, h: Tensor, cos_sin: Tensor) -> Tensor:
    """In one piece."""
    p = attention.projections(scale)
    x = p.norm.fn(h, scale)
    of_query, of_key_value = ([w.tensor for w in part.weights] for part in (p.query, p.key_value))
    k, v = p.key_value.fn(x, cos_sin, *of_key_value)
    q = p.query.fn(x, cos_sin, *of_query)
    assert isinstance(q, Tensor)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=p.scale, enable_gqa=True)
    y = p.output.fn(out.transpose(1, 2), attention.wo.weight)
    assert isinstance(y, Tensor)
    return h + y


CASES: list[tuple[Callable[[DecoderArgs], Functions], str, int, str | None, bool]] = [
    *((Functions, variant, rows, None, True) for variant in VARIANTS for rows in (1, 2)),
    *((make, "both", 2, None, False) for make, _ in OWN if make is not AnothersWeight),
    (AnothersWeight, "llama", 2, None, True),
    (Functions, "llama", 1, "aot_eager", False),
    (Functions, "both", 2, "aot_eager", True),
    (ScaledHeads, "both", 2, "aot_eager", False),
]


@pytest.mark.parametrize(("make", "variant", "rows", "backend", "hold"), CASES)
def test_gradients_are_those_of_autograd(
    make: Callable[[DecoderArgs], Functions],
    variant: str,
    rows: int,
    backend: str | None,
    hold: bool,
) -> None:
    """By tiles of 8 of 12 tokens and stages of 3 of 8 heads."""
    args = VARIANTS[variant]
    f = make(args)
    attention, scale = attention_of(f, args)
    h, dy = random(rows, 12, args.dim).requires_grad_(), random(rows, 12, args.dim)
    cos_sin = f.rope.cos_sin(torch.arange(12).expand(rows, 12), torch.float64)
    inputs = [h, scale, *attention.parameters()]
    want = torch.autograd.grad(by_autograd(attention, scale, h, cos_sin), inputs, dy)
    if backend is not None:
        f.compile(backend)
    strategy = UPipe(
        Math(), ulysses=ALONE, heads_per_stage=3, tile_tokens=8 * rows, hold_normed_input=hold
    )
    got = torch.autograd.grad(strategy.attend(h, cos_sin, attention.projections(scale)), inputs, dy)
    torch.compiler.reset()
    for x, exact in zip(got, want, strict=True):
        torch.testing.assert_close(x, exact, rtol=1e-10, atol=1e-10)


TOKENS = 256
ONE_HEAD = DecoderArgs(512, 1, 1, 1, 16, 16, head_dim=8)  # as a stage of one head is: narrow


def tile(
    part: Projection, places: Tensor, x: Tensor, dx: Tensor, needs_grad: bool = True
) -> list[GradSum]:
    """Backward of a tile whose outputs have gradients of 1."""
    leaves = [leaf(w.tensor, needs_grad) for w in part.weights]
    with torch.no_grad():
        outputs = part.fn(x, places, *leaves)
    grads = [torch.ones_like(y) for y in (outputs if isinstance(outputs, tuple) else (outputs,))]
    sums = [GradSum(w) for w in leaves]
    add_input_gradients(part, x, places, leaves, grads, dx, sums)
    return sums


@pytest.mark.parametrize("name", ["query", "key_value"])
@pytest.mark.parametrize("variant", ["llama", "both"])
def test_inductor_adds_what_the_function_run_whole_does(variant: str, name: str) -> None:
    """To the last tokens of two rows, from an input that is such a part too."""
    f = Functions(VARIANTS[variant])
    attention, scale = attention_of(f, VARIANTS[variant])
    x = random(2, 12, ARGS.dim)[:, 7:]
    places = f.rope.cos_sin(torch.arange(5).expand(2, 5), torch.float64)
    part = getattr(attention.projections(scale), name)
    whole = dataclasses.replace(part, products=())
    f.compile("inductor")
    compiled = getattr(attention.projections(scale), name)
    assert compiled.products and compiled.after is not part.after
    found = []
    for each in (whole, compiled):
        dx = torch.ones(2, 12, ARGS.dim, dtype=torch.float64)
        sums = tile(each, places, x, dx[:, 7:])
        found.append([dx, *(s.result() for s in sums)])
    torch.compiler.reset()
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def cost(name: str, qk_norm: bool, needs_grad: bool, products: bool = True) -> Cost:
    """Of a tile's backward."""
    args = dataclasses.replace(ONE_HEAD, qk_norm=qk_norm, qkv_bias=True)
    with torch.device("meta"):
        attention, scale = Attention(args, Functions(args)), torch.empty(args.dim)
        x, dx = (torch.empty(1, TOKENS, args.dim) for _ in range(2))
        places = torch.empty(1, TOKENS, args.head_dim)
    part: Projection = getattr(attention.projections(scale), name)
    if not products:
        part = dataclasses.replace(part, products=())
    leaves = [leaf(w.tensor, needs_grad) for w in part.weights]
    grads = [x.new_empty(1, TOKENS, 1, args.head_dim) for _ in range(2 if name != "query" else 1)]
    sums = [GradSum(w) for w in leaves]
    with Meter() as meter:
        add_input_gradients(part, x, places, leaves, grads, dx, sums)
    assert all((s.total is not None) == needs_grad for s in sums)
    return meter.cost


@pytest.mark.parametrize("name", ["query", "key_value"])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_no_product_is_made_that_nobody_reads(name: str, qk_norm: bool, needs_grad: bool) -> None:
    """Of each matrix the gradient of x, that of the matrix, and again what a norm of heads takes."""
    matrices = 1 if name == "query" else 2
    products = matrices * (1 + needs_grad) + qk_norm
    one = 2 * TOKENS * ONE_HEAD.head_dim * ONE_HEAD.dim
    assert cost(name, qk_norm, needs_grad).flops == products * one


@pytest.mark.parametrize("name", ["query", "key_value"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_no_gradient_of_the_normed_input_exists_beside_the_sum(name: str, qk_norm: bool) -> None:
    hidden = 4 * TOKENS * ONE_HEAD.dim
    assert cost(name, qk_norm, True).peak < hidden / 2
    assert cost(name, qk_norm, True, products=False).peak > hidden
