"""Kernels of this machine against dense attention in fp64: rows, packed rows, rectangles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.attention.test_kernels_reference import (
    Bounds,
    dense,
    dense_with_gradients,
    visible,
)
from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.attention.kernels import CpuFlash, Kernel, Math
from torchtitan_lc.attention.kernels.cuda import Cudnn, head_slices, within_reach
from torchtitan_lc.attention.kernels.split import SplitGroups

S, D, SCALE = 37, 16, 0.3
HERE = pytest.mark.parametrize("kernel", [CpuFlash(), Math()], ids=lambda k: k.name)
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
HEADS = [(4, 4), (4, 2), (6, 3), (4, 1), (1, 1)]

PACKED: dict[str, Bounds] = {
    "one row": ((0, 5, 6, 20, S),),
    "rows differ": ((0, 5, 6, 20, S), (0, S), (0, 13, S)),
    "one token at either edge": ((0, 1, S - 1, S), (0, S - 1, S)),
    "one token each": (tuple(range(S + 1)), (0, 16, 32, S)),
}


def random_qkv(rows: int, n: int, m: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Cut from one wide tensor: strided views, as they come out of a fused projection."""
    wide = torch.randn(rows, S, n + 2 * m, D, dtype=dtype)
    return [wide[:, :, :n], wide[:, :, n : n + m], wide[:, :, n + m :]]


def check(
    kernel: Kernel, dout: Tensor, qkv: list[Tensor], causal: bool, bounds: Bounds | None
) -> None:
    q, k, v = qkv
    sees = visible(q.shape[0], S, causal, bounds)
    want_out, want_lse, want_grads = dense_with_gradients(dout, q, k, v, SCALE, sees)
    documents = Documents(bounds) if bounds is not None else None
    out, lse = kernel.forward(q, k, v, causal=causal, scale=SCALE, documents=documents)
    grads = kernel.backward(
        dout, q, k, v, out, lse, causal=causal, scale=SCALE, documents=documents
    )
    assert all(x.is_contiguous() for x in (out, lse, *grads))
    torch.testing.assert_close(out, want_out, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-12)
    for got, want in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


@HERE
@CAUSAL
@pytest.mark.parametrize(("n", "m"), HEADS)
@pytest.mark.parametrize("rows", [1, 3])
def test_whole_rows_equal_dense_attention(
    kernel: Kernel, n: int, m: int, causal: bool, rows: int
) -> None:
    torch.manual_seed(n + m)
    qkv = random_qkv(rows, n, m)
    check(kernel, torch.randn_like(qkv[0]), qkv, causal, None)


@HERE
@CAUSAL
@pytest.mark.parametrize(("n", "m"), HEADS)
@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_equal_dense_attention_within_each_document(
    kernel: Kernel, n: int, m: int, causal: bool, name: str
) -> None:
    torch.manual_seed(n + m)
    bounds = PACKED[name]
    qkv = random_qkv(len(bounds), n, m)
    check(kernel, torch.randn_like(qkv[0]), qkv, causal, bounds)


@HERE
@CAUSAL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_changed_token_changes_no_bit_of_another_document(
    kernel: Kernel, causal: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    documents = Documents(((0, 5, 20, S), (0, 30, S)))
    q, k, v = random_qkv(2, 4, 2, dtype)
    dout = torch.randn_like(q)

    def run() -> list[Tensor]:
        """Everything that a kernel gives, tokens on axis 1."""
        out, lse = kernel.forward(q, k, v, causal=causal, scale=SCALE, documents=documents)
        grads = kernel.backward(
            dout, q, k, v, out, lse, causal=causal, scale=SCALE, documents=documents
        )
        return [out, lse.transpose(1, 2), *grads]

    before = run()
    for x in (q, k, v):
        x[0, 7] += 1.0  # a token of the second document of the first row
    for old, new in zip(before, run(), strict=True):
        assert not torch.equal(old[0, 5:20], new[0, 5:20])
        assert torch.equal(old[0, :5], new[0, :5]) and torch.equal(old[0, 20:], new[0, 20:])
        assert torch.equal(old[1], new[1])


@HERE
@pytest.mark.parametrize("cut", [1, 12, S - 1])
@pytest.mark.parametrize(("n", "m"), [(4, 2), (3, 3), (1, 1)])
@pytest.mark.parametrize("queries", [1, 20])
def test_rectangles_merged_by_lse_equal_the_whole(
    kernel: Kernel, cut: int, n: int, m: int, queries: int
) -> None:
    """What ring attention does: out and lse of all keys go into the backward of each part of them."""
    torch.manual_seed(cut)
    q, k, v = random_qkv(2, n, m)
    q = q[:, :queries]
    dout = torch.randn_like(q)
    want_out, want_lse, want_grads = dense_with_gradients(dout, q, k, v, SCALE)

    parts = [(k[:, :cut], v[:, :cut]), (k[:, cut:], v[:, cut:])]
    results = [kernel.forward(q, *part, causal=False, scale=SCALE) for part in parts]
    lse = torch.logaddexp(results[0][1], results[1][1])
    shares = [(part_lse - lse).exp().transpose(1, 2).unsqueeze(-1) for _, part_lse in results]
    out = sum(share * part for share, (part, _) in zip(shares, results, strict=True))
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out, want_out, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-12)

    grads = [kernel.backward(dout, q, *part, out, lse, causal=False, scale=SCALE) for part in parts]
    torch.testing.assert_close(grads[0][0] + grads[1][0], want_grads[0], rtol=0, atol=1e-11)
    for i in (1, 2):
        whole = torch.cat([grads[0][i], grads[1][i]], dim=1)
        torch.testing.assert_close(whole, want_grads[i], rtol=0, atol=1e-11)


def test_cudnn_which_refuses_a_single_key_does_one_by_products() -> None:
    torch.manual_seed(0)
    q, k, v = random_qkv(2, 4, 2)
    k, v = k[:, :1], v[:, :1]
    out, lse = Cudnn().row_forward(q, k, v, False, SCALE)
    dout = torch.randn_like(out)
    want_out, want_lse, want_grads = dense_with_gradients(dout, q, k, v, SCALE)
    torch.testing.assert_close(out, want_out, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-12)
    grads = Cudnn().row_backward(dout, q, k, v, out, lse, False, SCALE)
    for got, want in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@HERE
def test_bf16_comes_back_as_bf16_with_lse_in_fp32(kernel: Kernel) -> None:
    torch.manual_seed(0)
    q, k, v = random_qkv(2, 4, 2, torch.bfloat16)
    bounds = PACKED["rows differ"][:2]
    out, lse = kernel.forward(q, k, v, causal=True, scale=SCALE, documents=Documents(bounds))
    sees = visible(2, S, True, bounds)
    want_out, want_lse = dense(q.double(), k.double(), v.double(), SCALE, sees)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-4)
    # bf16 rounds to 2^-9 of a value
    torch.testing.assert_close(out.double(), want_out, rtol=2**-7, atol=2**-7)


@HERE
@pytest.mark.parametrize(
    ("shapes", "causal", "bounds", "words"),
    [
        ([(1, 8, 2, 4), (1, 9, 2, 4)], True, None, "8 queries on 9 keys"),
        ([(1, 8, 3, 4), (1, 8, 2, 4)], True, None, "do not fit"),
        ([(1, 8, 2, 4), (2, 8, 2, 4)], False, None, "do not fit"),
        ([(1, 8, 2, 4), (1, 8, 2, 4)], True, ((0, 3, 9),), "1 rows of 9 tokens"),
        ([(2, 8, 2, 4), (2, 8, 2, 4)], False, ((0, 3, 8),), "1 rows of 8 tokens"),
        ([(1, 8, 2, 4), (1, 9, 2, 4)], False, ((0, 3, 8),), "k 1 of 9"),
    ],
)
def test_shapes_that_do_not_fit_are_an_error_with_the_numbers(
    kernel: Kernel,
    shapes: list[tuple[int, ...]],
    causal: bool,
    bounds: Bounds | None,
    words: str,
) -> None:
    q, k = torch.zeros(shapes[0]), torch.zeros(shapes[1])
    documents = Documents(bounds) if bounds else None
    with pytest.raises(ValueError, match=words):
        kernel.forward(q, k, k, causal=causal, scale=1.0, documents=documents)
    lse = torch.zeros(q.shape[0], q.shape[2], q.shape[1])
    with pytest.raises(ValueError, match=words):
        kernel.backward(q, q, k, k, q, lse, causal=causal, scale=1.0, documents=documents)


def test_cudnn_gets_at_most_2_31_elements_a_call_and_every_head_once() -> None:
    q, k = torch.empty(1, 10, 12, 8), torch.empty(1, 10, 4, 8)  # 240 elements per KV head
    parts = head_slices(q, k, limit=500)
    assert parts == [(slice(0, 6), slice(0, 2)), (slice(6, 12), slice(2, 4))]
    assert len(head_slices(q, k)) == 1
    uneven = head_slices(q, k, limit=800)
    assert [(q[:, :, a].shape[2], k[:, :, b].shape[2]) for a, b in uneven] == [(9, 3), (3, 1)]
    with pytest.raises(ValueError, match="240"):
        head_slices(q, k, limit=200)


def test_a_view_that_reaches_too_far_is_copied_and_others_are_not() -> None:
    wide = torch.arange(4 * 6.0).view(1, 4, 6, 1)
    view = wide[:, :, :2]
    assert within_reach(view, limit=20) is view  # its last element is 19 after its first
    copy = within_reach(view, limit=19)
    assert copy.is_contiguous() and torch.equal(copy, view)


@pytest.mark.parametrize("packed", [False, True])
def test_a_large_backward_is_split_by_member_of_the_groups_with_the_same_result(
    packed: bool,
) -> None:
    calls = []

    class Seen(CpuFlash):
        def backward(self, dout: Tensor, q: Tensor, *args: Any, **mask: Any) -> Any:
            calls.append(q.shape[2])
            return super().backward(dout, q, *args, **mask)

    q, k, v = random_qkv(2, 6, 2)
    documents = Documents(((0, 5, q.shape[1]), (0, q.shape[1]))) if packed else None
    dout = torch.randn_like(q)
    whole = SplitGroups(Seen())
    split = SplitGroups(Seen(), whole=q.numel() - 1)
    out, lse = whole.forward(q, k, v, causal=True, scale=0.3, documents=documents)
    want = whole.backward(dout, q, k, v, out, lse, causal=True, scale=0.3, documents=documents)
    assert calls == [6]
    got = split.backward(dout, q, k, v, out, lse, causal=True, scale=0.3, documents=documents)
    assert calls == [6, 2, 2, 2]
    for mine, right in zip(got, want, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
