"""A block in float8 on a GPU, against the same block in bf16: compiled or not, in tiles of odd sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.ops.test_linear import E4M3, E5M2, RECIPES, both
from torchtitan_lc.attention.kernels import choose_kernel
from torchtitan_lc.attention.local import Local
from torchtitan_lc.config.job_config import Float8
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.float8 import use_float8
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.ops.linear import float8_missing

pytestmark = pytest.mark.gpu

ARGS = DecoderArgs(dim=1024, n_layers=1, n_heads=8, n_kv_heads=2, hidden_dim=2048, vocab_size=64)
TOKENS, TILE = 1000, 384  # the last tile has 232 tokens, no multiple of 16


@pytest.fixture(autouse=True)
def usable() -> None:
    missing = float8_missing("cuda", emulate=False)
    if missing:
        pytest.skip("; ".join(missing))


def run(config: Float8 | None, compiled: bool = False) -> list[Tensor]:
    """What the block adds to its input, and the gradients of the input's part and of its weights."""
    with torch.device("cuda"):
        model = Decoder(ARGS)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            std = p.shape[-1] ** -0.5
            p.copy_(
                torch.randn(p.shape, generator=generator) * std if p.dim() == 2 else torch.ones(())
            )
    model.bfloat16()
    kernel = choose_kernel("auto", device_type="cuda", dtype=torch.bfloat16, head_dim=128).kernel
    model.execution.strategy = Local(kernel, tile_tokens=TILE)
    model.execution.mlp_tokens = TILE
    if config is not None:
        use_float8(model, config)
    block = model.blocks[0]
    if compiled:
        block.functions.compile("inductor")
    shape = (1, TOKENS, ARGS.dim)
    h, dy = (torch.randn(shape, generator=generator).bfloat16().cuda() for _ in range(2))
    h.requires_grad_()
    positions = torch.arange(TOKENS, device="cuda").view(1, -1)
    added = block(h, model.functions.rope.cos_sin(positions), None).float() - h.float()
    grads = torch.autograd.grad(added, [h, *block.parameters()], dy.float())
    return [added.detach(), *(grad.float() for grad in grads)]


def errors(got: list[Tensor], want: list[Tensor]) -> list[float]:
    return [((x - y).norm() / y.norm()).item() for x, y in zip(got, want, strict=True)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_block_differs_from_bf16_by_float8s_rounding(recipe: Any, compiled: bool) -> None:
    want = run(None)
    try:
        found = errors(run(Float8(enable=True, recipe_name=recipe), compiled), want)
    finally:
        torch.compiler.reset()
    # As in tests/unit/models/test_float8.py: four products forward, four backward, squares adding up.
    forward = 4 * both(E4M3, E4M3) ** 2
    backward = 4 * both(E5M2 if recipe == "tensorwise" else E4M3, E4M3) ** 2
    assert 0.02 < found[0] <= forward**0.5, found[0]
    for error in found[1:]:
        assert 0.02 < error <= (forward + backward) ** 0.5, found


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_tensor_cores_round_like_the_emulation(recipe: Any) -> None:
    real = run(Float8(enable=True, recipe_name=recipe))
    emulated = run(Float8(enable=True, recipe_name=recipe, emulate=True))
    # What differs is the order of sums, those of forward kept in fewer bits, and bf16. Where that moves a
    # value over the middle between two of float8 its rounding differs, but most stay. "tensorwise" has
    # gradients in E5M2, whose values lie twice as far apart as E4M3's: 0.053 was seen on an H200.
    bound = 0.1 if recipe == "tensorwise" else 0.05
    for error in errors(real, emulated):
        assert error <= bound
