"""CUDA attention kernels against dense attention in fp64."""

from __future__ import annotations

import pytest
import torch

from torchtitan_lc.attention.kernels import KERNELS, Kernel, Math

pytestmark = pytest.mark.gpu

CUDA_KERNELS = ("fa4", "cudnn", "sdpa")


def _kernel(name: str, head_dim: int) -> Kernel:
    kernel = KERNELS[name]()
    problem = kernel.unsupported("cuda", torch.bfloat16, head_dim)
    if problem:
        pytest.skip(f"{name} {problem}")
    return kernel


@pytest.mark.parametrize("name", CUDA_KERNELS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (4, 1), (6, 2)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq", [1024, 1001])
def test_forward_and_backward_equal_the_reference(
    name: str, head_dim: int, n: int, m: int, causal: bool, seq: int
) -> None:
    kernel = _kernel(name, head_dim)
    torch.manual_seed(seq + n)
    shapes = [(2, seq, n, head_dim), (2, seq, m, head_dim), (2, seq, m, head_dim)]
    q, k, v = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
    dout = torch.randn_like(q)
    scale = head_dim**-0.5
    exact = Math()
    wq, wk, wv = (x.double() for x in (q, k, v))
    want_out, want_lse = exact.forward(wq, wk, wv, causal=causal, scale=scale)
    want = exact.backward(dout.double(), wq, wk, wv, want_out, want_lse, causal=causal, scale=scale)

    out, lse = kernel.forward(q, k, v, causal=causal, scale=scale)
    grads = kernel.backward(dout, q, k, v, out, lse, causal=causal, scale=scale)
    assert lse.shape == (2, n, seq) and lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-3)
    for got, expected in zip((out, *grads), (want_out, *want), strict=True):
        assert got.shape == expected.shape
        # bf16 rounds to 2^-9 of a value; a wrong head, row or mask is off by its own size.
        assert (got - expected).norm() <= 6e-3 * expected.norm()


@pytest.mark.parametrize("name", CUDA_KERNELS)
def test_views_of_a_wider_buffer_are_read_right(name: str) -> None:
    kernel = _kernel(name, 64)
    wide = torch.randn(1, 512, 6, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = wide[:, :, :2], wide[:, :, 2:4], wide[:, :, 4:]
    out, lse = kernel.forward(q, k, v, causal=True, scale=0.125)
    plain = [x.contiguous() for x in (q, k, v)]
    want, want_lse = kernel.forward(*plain, causal=True, scale=0.125)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
