"""The meter against arithmetic, and its shape rules against torch's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lc.tools.meter import Cost, Meter


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def test_peak_flops_and_traffic_of_a_product_and_a_sum() -> None:
    a, b = _meta(16, 32).detach(), _meta(32, 8).detach()
    with Meter() as meter:
        c = a @ b
        d = c + c
        del c
        e = d * 2
    assert meter.cost.flops == 2 * 16 * 32 * 8
    assert meter.cost.peak == 2 * (16 * 8 * 2)  # never three at a time
    assert meter.cost.traffic == (3 + 2) * 16 * 8 * 2
    assert meter.cost.calls == 3
    assert meter.now == 2 * 16 * 8 * 2
    del d, e
    assert meter.now == 0


def test_a_product_in_place_reads_and_writes_what_it_adds_to() -> None:
    a, b, c = _meta(16, 32).detach(), _meta(32, 8).detach(), _meta(2, 16, 8).detach()
    with Meter() as meter:
        result = c[0].addmm_(a, b)
    assert result.shape == (16, 8) and meter.now == 0
    assert meter.cost == Cost(flops=2 * 16 * 32 * 8, traffic=2 * 16 * 8 * 2, calls=1)


def test_views_of_what_was_there_before_weigh_nothing() -> None:
    weight = _meta(64, 64)
    with Meter() as meter:
        piece = weight.detach()[:32].t()
    assert meter.peak == 0 and piece.shape == (64, 32)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.float() * torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + 1e-5),
        lambda x: F.silu(x) * x.sigmoid() - x.neg() / 3,
        lambda x: torch.cat((x, x * 2), dim=-1).sum(dim=(0, 1)),
        lambda x: x.add_(1).mul(x.new_ones(5, 1)).sum(),
        lambda x: F.log_softmax(x.float(), dim=-1).mean(),
        lambda x: F.cross_entropy(x, torch.zeros(4, 7, dtype=torch.int64, device=x.device)),
        lambda x: F.cross_entropy(
            x[:, 0].float(), torch.zeros(4, dtype=torch.int64, device=x.device), reduction="sum"
        ),
    ],
)
def test_shapes_and_gradients_are_those_of_a_real_device(fn: Callable[[Tensor], Any]) -> None:
    results = []
    for device in ("cpu", "meta"):
        leaf = torch.ones(4, 5, 7, dtype=torch.bfloat16, device=device, requires_grad=True)
        with Meter() if device == "meta" else nullcontext():
            y = fn(leaf * 1)
            (grad,) = torch.autograd.grad(y, leaf, torch.empty_like(y))
        results.append((y.shape, y.dtype, y.stride(), grad.shape, grad.dtype))
    assert results[0] == results[1]
