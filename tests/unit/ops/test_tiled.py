"""Tiles change neither values nor gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchtitan_lc.ops.mlp import swiglu
from torchtitan_lc.ops.tiled import tile_slices, tiled


def _mlp(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return x + swiglu(x, w1, w2, w3)


def _inputs(dtype: torch.dtype = torch.float64, batch: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, 64, 16), (24, 16), (16, 24), (24, 16)]
    return [
        torch.randn(s, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
        for s in shapes
    ]


@pytest.mark.parametrize("tile", [0, 1, 7, 16, 64, 1000])
def test_output_and_every_gradient_are_those_of_one_tile(tile: int) -> None:
    x, *weights = _inputs()
    want = _mlp(x, *weights)
    dy = torch.randn_like(want)
    want_grads = torch.autograd.grad(want, [x, *weights], dy)
    y = tiled(_mlp, x, *weights, tile_tokens=tile)
    grads = torch.autograd.grad(y, [x, *weights], dy)
    for got, expected in zip((y, *grads), (want, *want_grads), strict=True):
        assert (got - expected).norm() <= 1e-12 * expected.norm()


def test_gradients_of_two_micro_batches_add_up_in_a_filled_grad() -> None:
    x, *weights = _inputs()
    for _ in range(2):
        tiled(_mlp, x, *weights, tile_tokens=7).sum().backward()
    once = torch.autograd.grad(_mlp(x, *weights).sum(), weights)
    for weight, grad in zip(weights, once, strict=True):
        torch.testing.assert_close(weight.grad, 2 * grad)


def test_weights_that_need_no_gradient_get_none_and_the_others_stay_right() -> None:
    x, *weights = _inputs()
    weights[1].requires_grad_(False)
    want = torch.autograd.grad(_mlp(x, *weights).sum(), [x, weights[0], weights[2]])
    y = tiled(_mlp, x, *weights, tile_tokens=7)
    got = torch.autograd.grad(y.sum(), [x, weights[0], weights[2]])
    assert all(torch.allclose(a, b) for a, b in zip(got, want, strict=True))
    x.requires_grad_(False)
    tiled(_mlp, x, *weights, tile_tokens=7).sum().backward()
    assert weights[1].grad is None
    torch.testing.assert_close(weights[0].grad, want[1])


def test_weight_gradients_in_bf16_do_not_lose_digits_with_more_tiles() -> None:
    reference = _inputs()
    want = torch.autograd.grad(_mlp(*reference).sum(), reference[1:])
    errors = []
    for tile in (0, 4):
        x, *weights = _inputs(torch.bfloat16)
        got = torch.autograd.grad(tiled(_mlp, x, *weights, tile_tokens=tile).sum(), weights)
        errors.append(
            max(((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True))
        )
    assert errors[1] <= 1.25 * errors[0], errors


def test_a_non_contiguous_or_expanded_output_gradient_is_fine() -> None:
    x, *weights = _inputs()
    want = torch.autograd.grad(_mlp(x, *weights).sum(), x)
    got = torch.autograd.grad(tiled(_mlp, x, *weights, tile_tokens=7).sum(), x)
    assert torch.allclose(got[0], want[0])


def test_tiles_cover_all_tokens_once_and_count_all_rows() -> None:
    assert list(tile_slices(10, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(tile_slices(10, 4, batch=2)) == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]
    assert list(tile_slices(10, 0)) == [(0, 10)]
    assert list(tile_slices(3, 1, batch=8)) == [(0, 1), (1, 2), (2, 3)]


def test_the_gradient_may_lie_over_the_input_and_is_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 9, 4), (4, 4))
    )

    def run(over: bool) -> tuple[list[Tensor], bool]:
        leaf_x, leaf_w = x.clone().requires_grad_(), w.clone().requires_grad_()
        inner = leaf_x * 1
        memory = inner.data_ptr()
        y = tiled(
            lambda a, b: torch.tanh(a @ b), inner, leaf_w, tile_tokens=4, gradient_over_input=over
        )
        grad, dw = torch.autograd.grad(y.sum(), [inner, leaf_w])
        return [grad, dw], grad.data_ptr() == memory

    (apart, false), (over, true) = run(False), run(True)
    assert true and not false
    for a, b in zip(apart, over, strict=True):
        assert torch.equal(a, b)
