"""CUDA attention kernels where the whole matrix does not fit: sampled rows, large offsets, peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.test_kernels import CUDA, kernel_or_skip
from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.attention.kernels import Kernel, Math

pytestmark = pytest.mark.gpu


def near(got: Tensor, want: Tensor, what: str, slack: float = 0.0) -> None:
    """Vectors of one token and head: fewer numbers to average over than in whole matrices, hence more
    room than the 6e-3 there; and a floor for what is zero in exact arithmetic."""
    error = (got.double() - want).norm().item()
    assert error <= 1e-2 * want.norm().item() + 1e-4 + slack, f"{what}: off by {error:.2e}"


class Sample:
    """Exact attention of a few tokens of row 0, causal, in fp64, from bf16 q, k, v and dout.

    start, stop: the document of the token. Memory is linear in its length.
    """

    def __init__(self, qkvdo: Sequence[Tensor], scale: float, bounds: Sequence[int]) -> None:
        self.q, self.k, self.v, self.dout = qkvdo
        self.scale, self.bounds = scale, bounds
        self.group = self.q.shape[2] // self.k.shape[2]

    def document(self, token: int) -> tuple[int, int]:
        start = max(b for b in self.bounds if b <= token)
        return start, min(b for b in self.bounds if b > token)

    def check_query(self, out: Tensor, lse: Tensor, dq: Tensor, token: int, head: int) -> None:
        """out, lse and dq of a query depend on the keys before it alone."""
        start, _ = self.document(token)
        keys = slice(start, token + 1)
        k, v = (x[0, keys, head // self.group].double() for x in (self.k, self.v))
        q, dout = (x[0, token, head].double() for x in (self.q, self.dout))
        scores = k @ q * self.scale
        want_lse = scores.logsumexp(0)
        p = (scores - want_lse).exp()
        want_out = p @ v
        want_dq = (p * (v @ dout - want_out @ dout)) @ k * self.scale
        # The kernel takes sum(out * dout) from an out that was rounded to bf16, 2^-9 of each element;
        # with few keys and a saturated softmax that is much of dq. With many keys it is nothing.
        rounding = 2**-8 * (want_out * dout).norm() * (p @ k).norm() * self.scale
        at = f"query {token}, head {head}"
        assert abs(lse[0, head, token].double() - want_lse) <= 1e-3 + 1e-4 * want_lse.abs(), at
        near(out[0, token, head], want_out, f"out of {at}")
        near(dq[0, token, head], want_dq, f"dq of {at}", rounding.item())

    def check_key(
        self, out: Tensor, lse: Tensor, dk: Tensor, dv: Tensor, token: int, kv_head: int
    ) -> None:
        """dk and dv of a key sum over all later queries of its document, whose softmax is taken from
        the out and lse of the kernel (which check_query samples)."""
        _, stop = self.document(token)
        queries = slice(token, stop)
        k, v = (x[0, token, kv_head].double() for x in (self.k, self.v))
        want_dk, want_dv = torch.zeros_like(k), torch.zeros_like(v)
        for head in range(kv_head * self.group, (kv_head + 1) * self.group):
            q, dout, o = (x[0, queries, head].double() for x in (self.q, self.dout, out))
            p = (q @ k * self.scale - lse[0, head, queries].double()).exp()
            delta = (o * dout).sum(1)
            want_dv += p @ dout
            want_dk += (p * (dout @ v - delta)) @ q * self.scale
        near(dk[0, token, kv_head], want_dk, f"dk of key {token}, head {kv_head}")
        near(dv[0, token, kv_head], want_dv, f"dv of key {token}, head {kv_head}")


def run_and_sample(
    kernel: Kernel,
    qkvdo: Sequence[Tensor],
    bounds: Sequence[int] | None,
    tokens: Sequence[int],
    heads: Sequence[int],
) -> None:
    q, k, v, dout = qkvdo
    scale = q.shape[3] ** -0.5
    documents = Documents((tuple(bounds),)) if bounds is not None else None
    out, lse = kernel.forward(q, k, v, causal=True, scale=scale, documents=documents)
    dq, dk, dv = kernel.backward(
        dout, q, k, v, out, lse, causal=True, scale=scale, documents=documents
    )
    sample = Sample(qkvdo, scale, bounds or (0, q.shape[1]))
    for token in tokens:
        for head in heads:
            sample.check_query(out, lse, dq, token, head)
            sample.check_key(out, lse, dk, dv, token, head // sample.group)


def random_qkv(length: int, n: int, m: int, head_dim: int) -> list[Tensor]:
    """q, k, v and dout of one row."""
    torch.manual_seed(n)
    shapes = [(1, length, heads, head_dim) for heads in (n, m, m, n)]
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]


@CUDA
@pytest.mark.parametrize("packed", [False, True])
def test_a_whole_row_of_8k_equals_the_reference(name: str, packed: bool) -> None:
    kernel = kernel_or_skip(name, 128, packed)
    length = 8192
    documents = Documents(((0, 1, 1000, 4097, length),)) if packed else None
    q, k, v, dout = random_qkv(length, 4, 1, 128)
    case: dict[str, Any] = {"causal": True, "scale": 128**-0.5, "documents": documents}
    q64, k64, v64, dout64 = (x.double() for x in (q, k, v, dout))
    want_out, want_lse = Math().forward(q64, k64, v64, **case)
    want = Math().backward(dout64, q64, k64, v64, want_out, want_lse, **case)
    out, lse = kernel.forward(q, k, v, **case)
    grads = kernel.backward(dout, q, k, v, out, lse, **case)
    for got, expected in zip((out, *grads), (want_out, *want), strict=True):
        for part in (slice(None), slice(-2048, None)):  # late keys have small gradients
            error = (got[:, part].double() - expected[:, part]).norm() / expected[:, part].norm()
            assert error <= 6e-3, (part, error.item())


@CUDA
@pytest.mark.parametrize("packed", [False, True])
def test_sampled_rows_at_1m_tokens_equal_the_reference(name: str, packed: bool) -> None:
    kernel = kernel_or_skip(name, 128, packed)
    length = 2**20 + 37
    n, m = (4, 1) if packed else (1, 1)  # a whole row costs four times as much per head
    bounds = (0, 400_001, 400_002, 1_000_000, length) if packed else None
    tokens = [0, 1, 131_071, 400_000, 400_001, 400_002, 999_999, 1_000_000, length - 1]
    run_and_sample(kernel, random_qkv(length, n, m, 128), bounds, tokens, range(0, n, 3))


@CUDA
@pytest.mark.parametrize("packed", [False, True])
def test_the_last_rows_are_right_beyond_2_31_elements(name: str, packed: bool) -> None:
    kernel = kernel_or_skip(name, 128, packed)
    length, n, m = 2**14 + 64, 1024, 256  # many heads, a short row: little work
    bounds = (0, 128, 129, 16_000, length) if packed else None
    qkvdo = random_qkv(length, n, m, 128)
    assert qkvdo[0].numel() > 2**31
    tokens = [0, 128, 129, 16_000, 16_384, length - 2, length - 1]
    run_and_sample(kernel, qkvdo, bounds, tokens, [0, 511, 1023])


def _peak(kernel: Kernel, length: int, heads: tuple[int, int], head_dim: int) -> int:
    """Bytes that forward and backward hold at most, without their inputs."""
    q, k, v, dout = random_qkv(length, *heads, head_dim)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = kernel.forward(q, k, v, causal=True, scale=0.1)
    kernel.backward(dout, q, k, v, out, lse, causal=True, scale=0.1)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@CUDA
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_peak_memory_is_linear_in_the_sequence(name: str, head_dim: int, group: int) -> None:
    """A fallback to matrix products would hold 8 heads x 32K x 32K: 16 GiB in bf16."""
    kernel = kernel_or_skip(name, head_dim)
    heads = (8, 8 // group)
    _peak(kernel, 2048, heads, head_dim)  # compiles, and makes the libraries' own buffers
    half, whole = (_peak(kernel, s, heads, head_dim) for s in (16_384, 32_768))
    assert whole <= 2.2 * half + 2**24
    q_bytes = 32_768 * 8 * head_dim * 2
    assert whole <= 16 * q_bytes
