"""Token-wise operations on tensors of more than 2^31 elements: the last row is what it is alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchtitan_lc.attention.comm import HeadExchange
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.functions import Functions
from torchtitan_lc.ops.loss import tiled_loss
from torchtitan_lc.ops.tiled import tiled

pytestmark = pytest.mark.gpu

WIDTH = 4096
ARGS = DecoderArgs(WIDTH, 1, 32, 8, 256, 512)


@pytest.fixture
def f() -> Functions:
    return Functions(ARGS)


def _weight(*shape: int) -> Tensor:
    return (torch.randn(*shape, device="cuda") * shape[-1] ** -0.5).bfloat16().requires_grad_()


@pytest.mark.parametrize("tokens", [2**19 + 1, 600_000])
def test_norm_mlp_and_loss_are_right_beyond_2_31_elements(f: Functions, tokens: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
    assert x.numel() > 2**31
    last = x[:, -1:].clone().requires_grad_()
    scale = torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(f.norm(x, scale)[:, -1:], f.norm(last, scale))

    w1, w2, w3 = _weight(256, WIDTH), _weight(WIDTH, 256), _weight(256, WIDTH)
    x.requires_grad_()
    for tile in (0, 65_536):  # one tile is all rows at once
        y = tiled(f.mlp_half, x, scale, w1, w2, w3, tile_tokens=tile)
        alone = f.mlp_half(last, scale, w1, w2, w3)
        torch.testing.assert_close(y[:, -1:], alone, rtol=2e-2, atol=2e-2)
        dy = torch.zeros_like(y)
        dy[:, -1] = 1
        dx, dw1 = torch.autograd.grad(y, (x, w1), dy)
        want_dx, want_dw1 = torch.autograd.grad(alone, (last, w1), dy[:, -1:])
        torch.testing.assert_close(dx[:, -1:], want_dx, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(dw1, want_dw1, rtol=2e-2, atol=2e-2)
        assert not dx[:, : tokens // 2].any()
        del y, dy, dx

    table = _weight(512, WIDTH)
    labels = torch.full((1, tokens), -100, device="cuda")
    labels[0, -1] = 7
    loss = tiled_loss(f.loss, x, labels, scale, table, tile_tokens=65_536)
    alone = f.loss(last, labels[:, -1:], scale, table)
    torch.testing.assert_close(loss, alone, rtol=1e-3, atol=1e-3)
    (dx,) = torch.autograd.grad(loss, x)
    (want_dx,) = torch.autograd.grad(alone, last)
    torch.testing.assert_close(dx[:, -1:], want_dx, rtol=2e-2, atol=1e-3)
    assert not dx[:, :-1].any()


def test_rope_and_the_packed_buffer_are_right_beyond_2_31_elements(f: Functions) -> None:
    torch.manual_seed(0)
    tokens, heads = 2**19 + 1, 32
    q = torch.randn(1, tokens, heads, 128, device="cuda", dtype=torch.bfloat16)
    exchange = HeadExchange((heads,), 0, 1, tokens, 128, None)
    packed = exchange.new_packed(q)
    step = 65_536
    for start in range(0, tokens, step):
        exchange.write_rows(packed, start, q[:, start : start + step])
    assert torch.equal(exchange.read_rows(packed, tokens - 3, tokens), q[:, -3:])
    positions = torch.arange(tokens, device="cuda").view(1, -1) + 10_000_000
    angles = f.rope.cos_sin(positions)
    # fp32 of the whole would be 2^31 elements of 4 bytes each, several times: rotate it in tiles.
    rotated = [
        f.rope.rotate(q[:, a : a + step], angles[:, a : a + step]) for a in range(0, tokens, step)
    ]
    alone = f.rope.rotate(q[:, -1:], angles[:, -1:])
    assert torch.equal(rotated[-1][:, -1:], alone)
