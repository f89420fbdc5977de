"""In bf16 a few heads at a time are as exact as all at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchtitan_lc.attention.base import ALONE
from torchtitan_lc.attention.kernels import CpuFlash, Math
from torchtitan_lc.attention.local import Local
from torchtitan_lc.attention.staged import StagedStrategy
from torchtitan_lc.attention.upipe import UPipe
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.model import Decoder

ARGS = DecoderArgs(256, 1, 16, 4, 64, 64, init_std=0.06)


def _attention(strategy: StagedStrategy, dtype: torch.dtype) -> list[Tensor]:
    """What attention adds to the hidden state, its gradient without the residual's, the weights'."""
    model = Decoder(ARGS)
    model.init_weights(0)
    block = model.to(torch.bfloat16).to(dtype).blocks[0]
    generator = torch.Generator().manual_seed(1)
    h, dy = torch.randn(2, 1, 256, 256, generator=generator).bfloat16().to(dtype)
    h.requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    angles = model.functions.rope.cos_sin(torch.arange(256).view(1, -1), wide)
    projections = block.attention.projections(block.attention_norm.weight)
    y = strategy.attend(h, angles, projections)
    weights = [block.attention_norm.weight, *block.attention.parameters()]
    dh, *dweights = torch.autograd.grad(y, [h, *weights], dy)
    return [(y - h).detach(), dh - dy, *dweights]


def _errors(strategy: StagedStrategy) -> list[float]:
    want = _attention(Local(Math()), torch.float64)
    got = _attention(strategy, torch.bfloat16)
    return [((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True)]


@pytest.mark.parametrize("heads_per_stage", [1, 2])
@pytest.mark.parametrize("tile_tokens", [0, 64])
@pytest.mark.parametrize("sum_kv_gradients", [True, False])
def test_stages_cost_no_accuracy_against_one_stage(
    heads_per_stage: int, tile_tokens: int, sum_kv_gradients: bool
) -> None:
    """16 stages of one head: a sum that is rounded to bf16 at each of them would be 4 times as far off."""
    plain = _errors(Local(CpuFlash()))
    strategy = UPipe(
        CpuFlash(),
        ulysses=ALONE,
        heads_per_stage=heads_per_stage,
        tile_tokens=tile_tokens,
        sum_kv_gradients=sum_kv_gradients,
    )
    staged = _errors(strategy)
    names = ("out", "dh", "dnorm", "dwq", "dwk", "dwv", "dwo")
    for name, one, many in zip(names, plain, staged, strict=True):
        assert many <= 1.25 * one, f"{name}: {many:.5f} against {one:.5f}"
