"""RMS norm."""

from __future__ import annotations

import torch

from torchtitan_lc.ops.norm import rms_norm


def test_it_is_torchs_own_in_fp64() -> None:
    x, w = torch.randn(3, 5, 16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    torch.testing.assert_close(
        rms_norm(x, w, 1e-5), torch.nn.functional.rms_norm(x, (16,), w, 1e-5)
    )


def test_the_mean_square_of_bf16_is_taken_in_fp32() -> None:
    x = torch.full((1, 1, 4096), 3.0, dtype=torch.bfloat16)
    x[..., 0] = 100.0
    want = rms_norm(x.double(), torch.ones(4096, dtype=torch.float64), 1e-5)
    got = rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), 1e-5)
    assert got.dtype == torch.bfloat16
    assert (got - want).abs().max() <= 2**-8 * want.abs().max()
