"""[float8] in a decoder: its error, the same bits under every checkpointing, and who takes part."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tiny import gradients, masked_rows
from tests.unit.ops.test_linear import E4M3, E5M2, both
from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.attention.kernels import CpuFlash
from torchtitan_lc.attention.local import Local
from torchtitan_lc.config.job_config import Float8, JobConfig
from torchtitan_lc.memory.checkpointing import checkpoint_block
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.float8 import float8_problems, use_float8
from torchtitan_lc.models.decoder.functions import LINEARS
from torchtitan_lc.models.decoder.model import Decoder

ARGS = DecoderArgs(
    dim=64,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    hidden_dim=96,
    vocab_size=262,
    qkv_bias=True,
    qk_norm=True,
)
RECIPES: tuple[Any, ...] = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
ROWS = masked_rows(2, 48, packed=True)


def make(config: Float8 | None, mode: Any = "none") -> Decoder:
    """In tiles whose last ones are short."""
    model = Decoder(ARGS)
    model.init_weights(seed=0)
    model.execution.strategy = Local(CpuFlash(), tile_tokens=26)
    model.execution.mlp_tokens = 14
    model.execution.loss_tokens = 22
    for block in model.blocks:
        block.checkpoint = checkpoint_block(mode)
    if config is not None:
        use_float8(model, config)
    return model


def emulated(recipe: Any = "tensorwise", *filtered: str) -> Float8:
    pytest.importorskip("torchao")
    return Float8(enable=True, recipe_name=recipe, filter_fqns=list(filtered), emulate=True)


def step(model: Decoder) -> dict[str, Tensor]:
    """Loss and gradients."""
    documents = Documents.from_positions(ROWS["positions"])
    loss = model(ROWS["tokens"], ROWS["positions"], ROWS["labels"], documents)
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def block_step(model: Decoder) -> list[Tensor]:
    """What one block adds to its input, and the gradients of the input's part and of its weights."""
    generator = torch.Generator().manual_seed(1)
    h, dy = (torch.randn(2, 48, ARGS.dim, generator=generator) for _ in range(2))
    h.requires_grad_()
    block = model.blocks[0]
    with torch.no_grad():
        for p in block.parameters():
            if p.dim() == 2:  # so large that branches are as large as the stream
                p.copy_(torch.randn(p.shape, generator=generator) / p.shape[1] ** 0.5)
    documents = Documents.from_positions(ROWS["positions"])
    added = block(h, model.functions.rope.cos_sin(ROWS["positions"]), documents) - h
    parameters = list(block.parameters())
    return [added.detach(), *torch.autograd.grad(added, [h, *parameters], dy)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_block_is_as_exact_as_float8_is(recipe: Any) -> None:
    want, got = block_step(make(None)), block_step(make(emulated(recipe)))
    errors = [((x - y).norm() / y.norm()).item() for x, y in zip(got, want, strict=True)]
    # From h to what is added lie four products (value, output, w1 or w3, w2), on the way back four more,
    # with what forward rounded. Their errors are independent, so squares add up.
    forward = 4 * both(E4M3, E4M3) ** 2
    backward = 4 * both(E5M2 if recipe == "tensorwise" else E4M3, E4M3) ** 2
    assert 0.02 < errors[0] <= forward**0.5, errors[0]
    for error in errors[1:]:
        assert 0.02 < error <= (forward + backward) ** 0.5, errors


@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_are_the_same_whatever_is_kept_and_whatever_is_made_again(recipe: Any) -> None:
    want = step(make(emulated(recipe)))
    plain = step(make(None))
    assert not torch.equal(want["loss"], plain["loss"])
    for mode in ("full", "selective"):
        got = step(make(emulated(recipe), mode))
        for name, value in want.items():
            assert torch.equal(got[name], value), (mode, name)


def test_compiled_tile_functions_give_the_same() -> None:
    want = step(make(emulated("rowwise")))
    model = make(emulated("rowwise"))
    for functions in {model.functions, *(block.functions for block in model.blocks)}:
        functions.compile("aot_eager")
    try:
        for name, value in step(model).items():
            assert (value - want[name]).norm() <= 1e-2 * want[name].norm(), name
    finally:
        torch.compiler.reset()


# -- who takes part


def products(model: Decoder) -> set[str]:
    """Which weights of which layers are multiplied in float8."""
    return {
        f"{layer}.{name}"
        for layer, block in enumerate(model.blocks)
        for name in LINEARS
        if block.functions.linears[name] is not F.linear
    }


def every(*names: str) -> set[str]:
    return {f"{layer}.{name}" for layer in range(ARGS.n_layers) for name in names}


@pytest.mark.parametrize(
    ("filtered", "left"),
    [
        ([], every(*LINEARS)),
        (["output"], every(*LINEARS)),
        (["attention.wk", "attention.wv"], every("wq", "wo", "w1", "w2", "w3")),
        (["feed_forward"], every("wq", "wk", "wv", "wo")),
        (["layers.0.", "w2"], {n for n in every(*LINEARS) if n[0] != "0" and n[2:] != "w2"}),
    ],
)
def test_filter_fqns_leaves_out_what_it_names(filtered: list[str], left: set[str]) -> None:
    assert products(make(emulated("tensorwise", *filtered))) == left


@pytest.mark.parametrize("name", LINEARS)
def test_each_product_is_its_own(name: str) -> None:
    """A weight alone in float8: its own gradient's error shows that it was, and which."""
    others = [other for other in LINEARS if other != name]
    model = make(emulated("tensorwise", *others))
    used: list[str] = []
    for block in model.blocks:
        linear = block.functions.linears[name]

        def watched(x: Tensor, weight: Tensor, *bias: Tensor, linear: Any = linear) -> Tensor:
            used.append("x".join(map(str, weight.shape)))
            return linear(x, weight, *bias)

        block.functions.linears[name] = watched
    q, kv = ARGS.n_heads * ARGS.head_dim, ARGS.n_kv_heads * ARGS.head_dim
    rows = {"wq": q, "wk": kv, "wv": kv, "wo": ARGS.dim, "w1": 96, "w2": ARGS.dim, "w3": 96}
    columns = {"wo": q, "w2": 96}.get(name, ARGS.dim)
    assert not torch.equal(step(model)["loss"], step(make(None))["loss"])
    assert set(used) == {f"{rows[name]}x{columns}"}


def test_with_everything_filtered_the_bits_are_those_without_float8() -> None:
    want = step(make(None))
    for name, value in step(make(emulated("tensorwise", "layers."))).items():
        assert torch.equal(value, want[name]), name


def test_head_and_norms_compute_as_without_float8() -> None:
    plain, float8 = make(None), make(emulated())
    h = torch.randn(2, 48, ARGS.dim, generator=torch.Generator().manual_seed(0))
    assert torch.equal(plain.head(h, ROWS["labels"], None), float8.head(h, ROWS["labels"], None))
    scale = torch.rand(ARGS.dim)
    norms = [model.blocks[0].functions.norm(h, scale) for model in (plain, float8)]
    assert torch.equal(*norms)


def test_layers_with_the_same_products_share_their_functions() -> None:
    """So that they are compiled once."""
    layers = [block.functions for block in make(emulated("tensorwise", "layers.1.")).blocks]
    assert layers[0] is layers[2] and layers[0] is not layers[1]
    same = [block.functions for block in make(emulated("tensorwise", "wk")).blocks]
    assert all(a is b for a, b in pairwise(same))


# -- what is refused


def problems(filtered: tuple[str, ...] = (), **shape: Any) -> list[str]:
    config = JobConfig()
    config.float8.filter_fqns = list(filtered)
    return float8_problems(dataclasses.replace(ARGS, **shape), config)


def test_a_shape_of_multiples_of_16_passes() -> None:
    assert problems() == []
    assert problems(("output", "layers.2.attention")) == []


@pytest.mark.parametrize(
    ("shape", "size", "names"),
    [
        ({"hidden_dim": 100}, "hidden_dim = 100", ["feed_forward.w1", "w2", "w3"]),
        ({"head_dim": 24}, "head_dim = 24", ["attention.wq", "wk", "wv", "wo"]),
        ({"dim": 72}, "dim = 72", ["attention.wq", "attention.wo", "feed_forward.w3"]),
    ],
)
def test_a_side_that_16_does_not_divide_is_named_with_its_weights(
    shape: dict[str, Any], size: str, names: list[str]
) -> None:
    (text,) = problems(**shape)
    assert size in text and "multiple of 16" in text and "float8.filter_fqns" in text
    assert all(name in text for name in names)


def test_a_side_that_only_filtered_products_have_may_be_any() -> None:
    assert problems(("feed_forward",), hidden_dim=100) == []
    (text,) = problems(("w1", "layers.0.feed_forward.w2"), hidden_dim=100)
    assert "feed_forward.w2, feed_forward.w3" in text and "w1" not in text


def test_a_filter_that_names_nothing_is_refused() -> None:
    (text,) = problems(("attention.qkv",))
    assert "'attention.qkv'" in text and "layers.N.attention.wq" in text
