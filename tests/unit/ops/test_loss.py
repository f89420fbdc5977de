"""The tiled head and loss against plain cross entropy over full logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.live_memory import LiveMemory
from torchtitan_lc.ops.loss import IGNORE_INDEX, cross_entropy_sum, tiled_loss


def _fn(x: Tensor, labels: Tensor, w: Tensor) -> Tensor:
    return cross_entropy_sum(F.linear(x, w), labels)


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 64, 16, dtype=torch.float64, generator=g)
    w = torch.randn(97, 16, dtype=torch.float64, generator=g)
    labels = torch.randint(0, 97, (2, 64), generator=g)
    labels[0, :50] = IGNORE_INDEX
    return x.to(dtype).requires_grad_(), labels, w.to(dtype).requires_grad_()


def _plain(x: Tensor, labels: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("tile", [0, 1, 7, 16])
@pytest.mark.parametrize("upstream", [1.0, 0.37, 0.0])
def test_loss_and_gradients_are_exact_for_any_tile_and_upstream_factor(
    tile: int, upstream: float
) -> None:
    x, labels, w = _inputs()
    want = _plain(x, labels, w)
    want_grads = torch.autograd.grad(want * upstream, (x, w))
    loss = tiled_loss(_fn, x, labels, w, tile_tokens=tile)
    grads = torch.autograd.grad(loss * upstream, (x, w), retain_graph=True)
    again = torch.autograd.grad(loss * upstream, (x, w))
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
    for got, expected, twice in zip(grads, want_grads, again, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
        assert torch.equal(got, twice), "a second backward must not see scaled gradients"


def test_a_shard_without_live_labels_adds_zero_and_no_nan() -> None:
    x, labels, w = _inputs()
    labels = torch.full_like(labels, IGNORE_INDEX)
    loss = tiled_loss(_fn, x, labels, w, tile_tokens=7)
    assert loss.item() == 0
    assert all(not grad.any() for grad in torch.autograd.grad(loss, (x, w)))


def test_a_vector_of_losses_cannot_be_asked_for() -> None:
    x, labels, w = _inputs()
    per_token = lambda x, labels, w: F.linear(x, w).logsumexp(-1)  # noqa: E731
    with pytest.raises(RuntimeError):
        tiled_loss(per_token, x, labels, w, tile_tokens=7)


@pytest.mark.parametrize("frozen", ["x", "w"])
def test_gradients_that_nobody_wants_are_not_made(frozen: str) -> None:
    x, labels, w = _inputs()
    {"x": x, "w": w}[frozen].requires_grad_(False)
    other = w if frozen == "x" else x
    want = torch.autograd.grad(_plain(x, labels, w), other)
    got = torch.autograd.grad(tiled_loss(_fn, x, labels, w, tile_tokens=7), other)
    torch.testing.assert_close(got, want)
    with torch.no_grad():
        loss = tiled_loss(_fn, x, labels, w, tile_tokens=7)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, _plain(x, labels, w).detach())


def test_the_error_in_bf16_does_not_grow_with_the_number_of_tiles() -> None:
    x, labels, w = _inputs()
    want = torch.autograd.grad(_plain(x, labels, w), (x, w))
    errors = {}
    for tile in (0, 8):
        x16, labels, w16 = _inputs(torch.bfloat16)
        got = torch.autograd.grad(tiled_loss(_fn, x16, labels, w16, tile_tokens=tile), (x16, w16))
        errors[tile] = [((g - e).norm() / e.norm()).item() for g, e in zip(got, want, strict=True)]
    assert all(b <= 1.25 * a for a, b in zip(errors[0], errors[8], strict=True)), errors


def test_the_upstream_factor_is_not_rounded_to_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """1/100 in bf16 is 0.1 % too large."""
    monkeypatch.setattr("torchtitan_lc.ops.loss._PART", 500)  # several parts of either gradient
    torch.manual_seed(0)
    x, w = torch.randn(1, 100, 64).bfloat16(), (torch.randn(50, 64) / 8).bfloat16()
    labels = torch.randint(0, 50, (1, 100))
    found: list[tuple[Tensor, ...]] = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [t.to(dtype).detach().requires_grad_() for t in (x, w)]
        loss = tiled_loss(_fn, leaves[0], labels, leaves[1], tile_tokens=32)
        found.append(torch.autograd.grad(loss / 100, leaves))
    for got, want in zip(*found, strict=True):
        ratio = (got.double() * want).sum() / want.square().sum()
        assert abs(ratio - 1) < 2e-4


def test_gradients_do_not_stay_while_the_loss_is_held() -> None:
    """As the training step holds it, through the backward of all layers."""
    x = torch.randn(1, 4096, 4, requires_grad=True)
    labels = torch.zeros(1, 4096, dtype=torch.int64)
    with LiveMemory() as live:
        loss = tiled_loss(lambda x, labels: cross_entropy_sum(x, labels), x, labels, tile_tokens=8)
        before = live.now  # with the gradient of x, made in forward
        loss.backward()
        x.grad = None
        assert live.now <= before - x.nbytes
    assert loss.item() > 0
