"""CUDA attention kernels in bf16 against dense attention in fp64, whole matrices.

flash-attn-4 compiles for every head size, query heads per KV head, mask and packing that it meets first
(1 to 4 seconds); the cases share these so that the file stays near a minute and a half.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.unit.attention.test_kernels_reference import (
    Bounds,
    dense_with_gradients,
    visible,
)
from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.attention.kernels import KERNELS, Kernel

pytestmark = pytest.mark.gpu

CUDA = pytest.mark.parametrize("name", ["fa4", "fa3", "fa2", "cudnn", "sdpa"])
S = 1001
# A boundary within a kernel's block, on its edge, one-token documents, and rows that differ.
PACKED: Bounds = ((0, 1, 300, 301, 640, S), (0, 128, 256, 257, S))


def kernel_or_skip(name: str, head_dim: int, packed: bool = False) -> Kernel:
    kernel = KERNELS[name]()
    problem = kernel.unsupported("cuda", torch.bfloat16, head_dim, packed)
    if problem:
        pytest.skip(f"{name} {problem}")
    return kernel


def random_qkv(
    rows: int, length: int, n: int, m: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout."""
    torch.manual_seed(length + n + head_dim)
    shapes = [(rows, length, heads, head_dim) for heads in (n, m, m, n)]
    q, k, v, dout = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
    return q, k, v, dout


def assert_near(got: Tensor, want: Tensor, relative: float = 6e-3) -> None:
    assert got.shape == want.shape
    # bf16 rounds to 2^-9 of a value; a wrong head, row or mask is off by its own size. What is zero
    # in exact arithmetic (dq of a document of one token) may be a rounding of its terms.
    floor = 1e-3 * want.numel() ** 0.5
    assert (got.double() - want).norm() <= relative * want.norm() + floor


def stretches(bounds: Bounds | None) -> Iterator[tuple[int, slice]]:
    if bounds is None:
        yield from ((row, slice(None)) for row in range(2))
        return
    for row, edges in enumerate(bounds):
        yield from ((row, slice(a, b)) for a, b in pairwise(edges))


def check(
    kernel: Kernel,
    qkvdo: tuple[Tensor, Tensor, Tensor, Tensor],
    causal: bool,
    bounds: Bounds | None,
    relative: float = 6e-3,
) -> None:
    q, k, v, dout = qkvdo
    rows, length, n, head_dim = q.shape
    scale = head_dim**-0.5
    sees = visible(rows, length, causal, bounds).cuda()
    want_out, want_lse, want_grads = dense_with_gradients(
        dout.double(), q.double(), k.double(), v.double(), scale, sees
    )
    documents = Documents(bounds) if bounds is not None else None
    out, lse = kernel.forward(q, k, v, causal=causal, scale=scale, documents=documents)
    grads = kernel.backward(
        dout, q, k, v, out, lse, causal=causal, scale=scale, documents=documents
    )
    assert lse.shape == (rows, n, length) and lse.dtype == torch.float32
    assert all(x.is_contiguous() for x in (out, lse, *grads))
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-3)
    for got, want in zip((out, *grads), (want_out, *want_grads), strict=True):
        for row, tokens in stretches(bounds):  # or an error in a short one would hide
            assert_near(got[row, tokens], want[row, tokens], relative)


@CUDA
@pytest.mark.parametrize(
    ("head_dim", "group", "causal"),
    [(d, g, True) for d in (64, 128, 256) for g in (1, 4, 8)]
    + [(96, 4, True)]
    + [(d, 4, False) for d in (64, 96, 128, 256)],
)
def test_whole_rows_equal_the_reference(name: str, head_dim: int, group: int, causal: bool) -> None:
    kernel = kernel_or_skip(name, head_dim)
    for length in (S, 1024):
        check(kernel, random_qkv(2, length, 8, 8 // group, head_dim), causal, None)


@CUDA
@pytest.mark.parametrize(
    ("head_dim", "group", "causal"),
    [(d, 4, True) for d in (64, 96, 128, 256)] + [(128, 1, True), (128, 4, False)],
)
def test_packed_rows_equal_the_reference_within_each_document(
    name: str, head_dim: int, group: int, causal: bool
) -> None:
    kernel = kernel_or_skip(name, head_dim, packed=True)
    check(kernel, random_qkv(2, S, 8, 8 // group, head_dim), causal, PACKED)


@CUDA
def test_hundreds_of_documents_equal_the_reference(name: str) -> None:
    """Above 256 documents flash-attn-4 finds the document of a block in another way."""
    kernel = kernel_or_skip(name, 128, packed=True)
    bounds = ((*range(0, S - 1, 3), S), (*range(0, 700, 7), S))
    # With three keys, dp and its mean nearly cancel, and the rounding of out to bf16 that went into
    # the mean weighs twice as much (fa4 and FA2 alike: 0.8 % on H200).
    check(kernel, random_qkv(2, S, 4, 1, 128), True, bounds, relative=1.5e-2)


@CUDA
def test_rows_of_nothing_but_one_token_documents_equal_the_reference(name: str) -> None:
    kernel = kernel_or_skip(name, 128, packed=True)
    bounds = (tuple(range(65)), tuple(range(65)))
    check(kernel, random_qkv(2, 64, 4, 1, 128), True, bounds)


@CUDA
@pytest.mark.parametrize("causal", [True, False])
def test_a_changed_token_changes_no_bit_of_another_document(name: str, causal: bool) -> None:
    kernel = kernel_or_skip(name, 128, packed=True)
    q, k, v, _ = random_qkv(2, S, 8, 2, 128)
    how: dict[str, Any] = {"causal": causal, "scale": 0.1, "documents": Documents(PACKED)}
    before = [x.transpose(1, i) for i, x in enumerate(kernel.forward(q, k, v, **how), start=1)]
    for x in (q, k, v):
        x[0, 400] += 1.0  # a token of the fourth document of the first row
    after = [x.transpose(1, i) for i, x in enumerate(kernel.forward(q, k, v, **how), start=1)]
    for old, new in zip(before, after, strict=True):
        assert not torch.equal(old[0, 301:640], new[0, 301:640])
        assert torch.equal(old[0, :301], new[0, :301])
        assert torch.equal(old[0, 640:], new[0, 640:]) and torch.equal(old[1], new[1])


@CUDA
@pytest.mark.parametrize(("queries", "cut"), [(300, 513), (300, 1), (1, 513)])
def test_rectangles_merged_by_lse_equal_the_whole(name: str, queries: int, cut: int) -> None:
    """What ring attention does: out and lse of all keys go into the backward of each part of them."""
    kernel = kernel_or_skip(name, 128)
    q, k, v, dout = random_qkv(2, S, 8, 2, 128)
    q, dout = q[:, :queries], dout[:, :queries]
    scale = 128**-0.5
    want_out, want_lse, want_grads = dense_with_gradients(
        dout.double(), q.double(), k.double(), v.double(), scale
    )
    parts = [(k[:, :cut], v[:, :cut]), (k[:, cut:], v[:, cut:])]
    results = [kernel.forward(q, *part, causal=False, scale=scale) for part in parts]
    lse = torch.logaddexp(results[0][1], results[1][1])
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-3)
    out = torch.zeros_like(want_out)
    for part, part_lse in results:
        out += part.double() * (part_lse - lse).double().exp().transpose(1, 2).unsqueeze(-1)
    assert_near(out, want_out)
    out = out.to(q.dtype)
    grads = [kernel.backward(dout, q, *part, out, lse, causal=False, scale=scale) for part in parts]
    assert_near(grads[0][0].double() + grads[1][0].double(), want_grads[0])
    for i in (1, 2):
        assert_near(torch.cat([grads[0][i], grads[1][i]], dim=1), want_grads[i])


@CUDA
@pytest.mark.parametrize("packed", [False, True])
def test_views_of_a_wider_buffer_are_read_right(name: str, packed: bool) -> None:
    kernel = kernel_or_skip(name, 128, packed)
    wide = torch.randn(2, S, 12, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = wide[:, :, :8], wide[:, :, 8:10], wide[:, :, 10:]
    documents = Documents(PACKED) if packed else None
    out, lse = kernel.forward(q, k, v, causal=True, scale=0.125, documents=documents)
    q, k, v = (x.contiguous() for x in (q, k, v))
    want, want_lse = kernel.forward(q, k, v, causal=True, scale=0.125, documents=documents)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


@CUDA
@pytest.mark.parametrize("packed", [False, True])
def test_fake_results_have_the_shapes_and_strides_of_real_ones(name: str, packed: bool) -> None:
    kernel = kernel_or_skip(name, 128, packed)

    def facts() -> list[object]:
        q, k, v, dout = random_qkv(2, S, 8, 2, 128)
        documents = Documents(PACKED) if packed else None
        out, lse = kernel.forward(q, k, v, causal=True, scale=0.1, documents=documents)
        grads = kernel.backward(
            dout, q, k, v, out, lse, causal=True, scale=0.1, documents=documents
        )
        return [(x.shape, x.stride(), x.dtype, x.device) for x in (out, lse, *grads)]

    real = facts()
    with FakeTensorMode():
        assert facts() == real


@pytest.mark.parametrize("name", ["fa4", "fa3", "fa2", "sdpa"])
def test_gradients_repeat_bit_for_bit_when_torch_is_told_to_be_deterministic(name: str) -> None:
    kernel = kernel_or_skip(name, 128, packed=True)
    q, k, v, dout = random_qkv(2, S, 8, 2, 128)
    how: dict[str, Any] = {"causal": True, "scale": 0.1, "documents": Documents(PACKED)}
    torch.use_deterministic_algorithms(True)
    try:
        out, lse = kernel.forward(q, k, v, **how)
        runs = [kernel.backward(dout, q, k, v, out, lse, **how) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for run in runs for x, y in zip(run, runs[0], strict=True))
