"""Float8 products: as close to F.linear as float8's rounding allows, on any number of rows. Products of
backward: added in place, left out where nobody reads them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lc.ops.linear import (
    Float8Linear,
    add_gradient_of_input,
    float8_missing,
    gradient_of_weight,
    unread_product,
)

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
# The largest relative rounding of a value: half a unit of the last of 3 or 2 bits of mantissa.
E4M3, E5M2 = 2**-4, 2**-3


def both(x: float, y: float) -> float:
    """The relative error, in norm, of a product whose factors are off by ``x`` and ``y`` of themselves:
    signs are random, so squares add up."""
    return (x * x + y * y) ** 0.5


# Of the output, the gradient of x and that of the weight.
BOUNDS = {
    "tensorwise": [both(E4M3, E4M3), both(E5M2, E4M3), both(E5M2, E4M3)],
    "rowwise": [both(E4M3, E4M3)] * 3,
    "rowwise_with_gw_hp": [both(E4M3, E4M3), both(E4M3, E4M3), 1e-6],
}


def case(rows: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x [2, rows, 64], weight [48, 64], bias [48], and an output gradient."""
    generator = torch.Generator().manual_seed(rows)
    shapes = [(2, rows, 64), (48, 64), (48,), (2, rows, 48)]
    tensors = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
    return [t.requires_grad_() for t in tensors[:3]] + tensors[3:]


def run(linear: Any, tensors: list[Tensor]) -> list[Tensor]:
    """Output, gradients of x, weight and bias."""
    *inputs, dy = tensors
    y = linear(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


@pytest.mark.parametrize("rows", [64, 13])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_differ_from_fp32_by_float8s_rounding(recipe: str, rows: int) -> None:
    pytest.importorskip("torchao")
    tensors = case(rows)
    want, got = run(F.linear, tensors), run(Float8Linear(recipe, emulate=True), tensors)
    assert torch.allclose(got[3], want[3], rtol=1e-6, atol=1e-5)  # a sum, no product
    for x, exact, bound in zip(got, want, BOUNDS[recipe], strict=False):
        error = ((x - exact).norm() / exact.norm()).item()
        # Roundings are spread below the largest, and from a quarter of it on were float8's.
        assert error <= bound and (error >= bound / 4 or bound == 1e-6), error


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_comes_out_has_the_dtype_of_what_goes_in(recipe: str) -> None:
    pytest.importorskip("torchao")
    tensors = case(16, torch.bfloat16)
    want, got = run(F.linear, tensors), run(Float8Linear(recipe, emulate=True), tensors)
    for x, exact in zip(got, want, strict=True):
        assert x.dtype == torch.bfloat16 and x.shape == exact.shape


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_emulation_rounds_like_the_real_product(recipe: str) -> None:
    pytest.importorskip("torchao")
    tensors = case(32, torch.bfloat16)
    real = run(Float8Linear(recipe, emulate=False), tensors)  # torch has a slow one for CPUs
    emulated = run(Float8Linear(recipe, emulate=True), tensors)
    for x, y in zip(real, emulated, strict=True):
        assert (x - y).float().norm() <= 2**-8 * y.float().norm()


@pytest.mark.parametrize(
    ("recipe", "products"), [("tensorwise", 3), ("rowwise", 3), ("rowwise_with_gw_hp", 2)]
)
def test_products_are_real_ones_unless_they_are_emulated(
    recipe: str, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchao")
    real, calls = torch._scaled_mm, []

    def scaled_mm(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    run(Float8Linear(recipe, emulate=True), case(32, torch.bfloat16))
    assert not calls
    run(Float8Linear(recipe, emulate=False), case(32, torch.bfloat16))
    assert len(calls) == products


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_outlier_harms_its_tile_under_tensorwise_and_its_row_under_rowwise(recipe: str) -> None:
    pytest.importorskip("torchao")
    x, weight, bias, _ = (t.detach() for t in case(32))
    x[0, 0, 0] = 1e8
    want, got = F.linear(x, weight, bias), Float8Linear(recipe, emulate=True)(x, weight, bias)
    error = (got[1] - want[1]).norm() / want[1].norm()
    assert error > 0.5 if recipe == "tensorwise" else error <= both(E4M3, E4M3)


@pytest.mark.parametrize("rows", [1, 7, 8, 13])
def test_products_see_a_multiple_of_16_rows_whatever_a_tile_leaves(rows: int) -> None:
    pytest.importorskip("torchao")
    linear, seen = Float8Linear("tensorwise", emulate=True), []
    matmul = linear._matmul

    class Watched:
        @staticmethod
        def apply(x: Tensor, *others: Any) -> Tensor:
            seen.append(x.shape[0])
            return matmul.apply(x, *others)

    tensors = case(rows)
    without = run(linear, tensors)
    linear._matmul = Watched
    got = run(linear, tensors)
    assert seen == [-(-2 * rows // 16) * 16]
    assert got[0].shape == (2, rows, 48)
    for x, same in zip(got, without, strict=True):
        assert torch.equal(x, same)


def test_a_tile_of_zeros_has_zeros_and_no_nan() -> None:
    pytest.importorskip("torchao")
    x, weight, bias, dy = case(16)
    zeros = [torch.zeros_like(x).requires_grad_(), weight, bias, torch.zeros_like(dy)]
    y, dx, dweight, _ = run(Float8Linear("rowwise", emulate=True), zeros)
    assert torch.equal(y, bias.detach().expand_as(y))
    assert dx.abs().max() == 0 and dweight.abs().max() == 0


# -- in backward


@pytest.mark.parametrize("rows", [1, 3])
def test_gradients_of_a_product_are_those_of_autograd(rows: int) -> None:
    """Of the input added to a part of every row, and nowhere else."""
    x, dy = torch.randn(rows, 7, 6, requires_grad=True), torch.randn(rows, 7, 4)
    weight = torch.randn(4, 6, requires_grad=True)
    dx, dweight = torch.autograd.grad(F.linear(x, weight), [x, weight], dy)
    total = torch.ones(rows, 9, 6)
    with torch.no_grad():
        add_gradient_of_input(total[:, 1:8], dy, weight)
    torch.testing.assert_close(total[:, 1:8], 1 + dx)
    assert torch.equal(total[:, ::8], torch.ones(rows, 2, 6))
    torch.testing.assert_close(gradient_of_weight(dy, x.detach()), dweight)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_product_that_nobody_reads_lies_in_its_input(device: str) -> None:
    x, weight = torch.ones(2, 7, 6, device=device)[:, 3:], torch.ones(4, 6, device=device)
    y = unread_product(x, weight)
    assert y.shape == F.linear(x, weight).shape and y.dtype == x.dtype
    assert y.untyped_storage()._cdata == x.untyped_storage()._cdata


# -- what is missing


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: "torchao" if name == "torchao" else found(name)
    )


def _gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.usefixtures("installed")
def test_an_older_gpu_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpu(monkeypatch, (8, 6))
    (text,) = float8_missing("cuda", emulate=False)
    assert "8.9" in text and "8.6" in text and "emulate" in text
    assert float8_missing("cuda", emulate=True) == []
    for capability in ((8, 9), (9, 0), (10, 0)):
        _gpu(monkeypatch, capability)
        assert float8_missing("cuda", emulate=False) == []


@pytest.mark.usefixtures("installed")
def test_a_cpu_needs_emulation() -> None:
    (text,) = float8_missing("cpu", emulate=False)
    assert "float8.enable = true on cpu" in text and "float8.emulate = true" in text
    assert float8_missing("cpu", emulate=True) == []


def test_without_torchao_the_command_to_install_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (text,) = float8_missing("cpu", emulate=True)
    assert "pip install -e '.[float8]'" in text
    assert len(float8_missing("cpu", emulate=False)) == 2
