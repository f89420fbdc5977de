"""Kernels of this machine against dense attention in fp64, and the choice among kernels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torchtitan_lc.attention.kernels import KERNELS, CpuFlash, Kernel, Math, choose_kernel

KERNELS_HERE: list[Kernel] = [CpuFlash(), Math()]


def _dense(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    group = q.shape[2] // k.shape[2]
    outs, lses = [], []
    for head in range(q.shape[2]):
        scores = q[:, :, head] @ k[:, :, head // group].mT * scale
        if causal:
            scores = scores + torch.full(scores.shape[-2:], -math.inf, dtype=q.dtype).triu(1)
        outs.append(scores.softmax(-1) @ v[:, :, head // group])
        lses.append(scores.logsumexp(-1))
    return torch.stack(outs, 2), torch.stack(lses, 1)


@pytest.mark.parametrize("kernel", KERNELS_HERE, ids=lambda k: k.name)
@pytest.mark.parametrize(("n", "m"), [(4, 4), (4, 2), (6, 3), (4, 1), (1, 1)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_forward_and_backward_equal_dense_attention(
    kernel: Kernel, n: int, m: int, causal: bool, batch: int
) -> None:
    torch.manual_seed(n + m)
    S, D, scale = 37, 16, 0.3
    # Cut from one wide tensor: strided views, as they come out of a fused projection.
    wide = torch.randn(batch, S, n + 2 * m, D, dtype=torch.float64)
    q, k, v = wide[:, :, :n], wide[:, :, n : n + m], wide[:, :, n + m :]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want_out, want_lse = _dense(leaves[0], leaves[1], leaves[2], causal, scale)
    dout = torch.randn_like(want_out)
    want_grads = torch.autograd.grad(want_out, leaves, dout)

    out, lse = kernel.forward(q, k, v, causal=causal, scale=scale)
    grads = kernel.backward(dout, q, k, v, out, lse, causal=causal, scale=scale)
    assert torch.allclose(out, want_out, atol=1e-12)
    assert lse.is_contiguous() and torch.allclose(lse, want_lse, atol=1e-12)
    for got, want in zip(grads, want_grads, strict=True):
        assert got.shape == want.shape and torch.allclose(got, want, atol=1e-11)


def test_auto_takes_the_cpu_kernel_on_a_cpu_and_says_why() -> None:
    choice = choose_kernel("auto", device_type="cpu", dtype=torch.float32, head_dim=64)
    assert choice.kernel.name == "cpu" and "cpu" in choice.reason


def test_auto_without_a_fused_kernel_says_that_memory_is_quadratic() -> None:
    choice = choose_kernel("auto", device_type="cuda", dtype=torch.float32, head_dim=64)
    assert choice.kernel.name == "math" and "squared" in choice.reason


@pytest.mark.parametrize(
    ("name", "device", "dtype", "head_dim", "word"),
    [
        ("cudnn", "cpu", torch.bfloat16, 64, "CUDA"),
        ("cudnn", "cuda", torch.float32, 64, "bfloat16"),
        ("cudnn", "cuda", torch.bfloat16, 256, "256"),
        ("sdpa", "cuda", torch.bfloat16, 100, "100"),
        ("cpu", "cuda", torch.float32, 64, "cuda"),
        ("fa4", "cuda", torch.bfloat16, 64, "pip install"),
    ],
)
def test_a_named_kernel_that_cannot_do_the_case_is_an_error_that_says_what_can(
    name: str, device: str, dtype: torch.dtype, head_dim: int, word: str
) -> None:
    import importlib.util

    if name == "fa4" and importlib.util.find_spec("flash_attn"):
        pytest.skip("flash-attn-4 is installed here")
    with pytest.raises(ValueError, match=word):
        choose_kernel(name, device_type=device, dtype=dtype, head_dim=head_dim)


def test_every_kernel_is_known_under_its_own_name() -> None:
    assert all(KERNELS[name]().name == name for name in KERNELS)
