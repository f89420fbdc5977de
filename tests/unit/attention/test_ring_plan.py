"""Who attends to whom between the ranks of a ring: every pair of tokens that may, exactly once."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchtitan_lc.attention.layout import Layout
from torchtitan_lc.attention.ring import _Mask, merge


def _allowed(seq_len: int, causal: bool, bounds: tuple[int, ...]) -> Tensor:
    document = torch.zeros(seq_len, dtype=torch.long)
    for b in bounds[1:-1]:
        document[b:] += 1
    same = document.unsqueeze(1) == document.unsqueeze(0)
    return same.tril() if causal else same


@st.composite
def rings(draw: st.DrawFn) -> tuple[int, int, bool, list[tuple[int, ...]] | None]:
    ranks = draw(st.integers(2, 5))
    seq_len = 2 * ranks * draw(st.integers(1, 6))
    inner = st.sets(st.integers(1, seq_len - 1), max_size=8)
    rows = st.lists(inner.map(lambda b: (0, *sorted(b), seq_len)), min_size=1, max_size=2)
    return ranks, seq_len, draw(st.booleans()), draw(st.none() | rows)


@given(rings())
@settings(max_examples=150, deadline=None)
def test_every_allowed_pair_is_covered_exactly_once(
    case: tuple[int, int, bool, list[tuple[int, ...]] | None],
) -> None:
    ranks, seq_len, causal, rows = case
    layout = Layout(ring=ranks)
    held = [
        torch.cat([torch.arange(a, b) for a, b in layout.ring_ranges(r, seq_len)])
        for r in range(ranks)
    ]
    packed = tuple(rows) if rows is not None else None
    count = len(rows) if rows is not None else 1
    seen = torch.zeros(count, seq_len, seq_len, dtype=torch.long)
    for rank in range(ranks):
        mask = _Mask(ranks, rank, seq_len, causal, packed)
        size = len(held[rank])
        own = mask.own_documents
        for row in range(count):
            bounds = own.bounds[row] if own is not None else (0, size)
            local = _allowed(size, causal, bounds)
            seen[row][held[rank].unsqueeze(1), held[rank].unsqueeze(0)] += local.long()
        for source in range(ranks):
            if source == rank:
                continue
            for which, box in mask.rectangles(source):
                q = held[rank][box.q_start : box.q_stop]
                k = held[source][box.k_start : box.k_stop]
                assert len(q) and len(k), "an empty kernel call"
                for row in range(count)[which]:
                    seen[row][q.unsqueeze(1), k.unsqueeze(0)] += 1
    for row in range(count):
        bounds = rows[row] if rows is not None else (0, seq_len)
        assert torch.equal(seen[row], _allowed(seq_len, causal, bounds).long())


def test_one_document_needs_one_call_per_step_and_every_rank_has_the_same_work() -> None:
    ranks, seq_len = 4, 64
    work = []
    for rank in range(ranks):
        mask = _Mask(ranks, rank, seq_len, True, None)
        assert mask.own_documents is None
        boxes = [mask.rectangles(s) for s in range(ranks) if s != rank]
        assert all(len(b) == 1 for b in boxes)
        areas = [(b.q_stop - b.q_start) * (b.k_stop - b.k_start) for ((_, b),) in boxes]
        work.append(sum(areas))
    assert len(set(work)) == 1


def test_all_calls_of_a_micro_batch_share_one_copy_of_the_boundaries() -> None:
    bounds = (0, 3, 16), (0, 16)
    first, second = (_Mask(2, 0, 16, True, bounds).own_documents for _ in range(2))
    assert first is not None and second is not None
    cpu = torch.device("cpu")
    assert first.cu_seqlens(cpu) is second.cu_seqlens(cpu)


def test_partial_results_merge_to_attention_over_all_keys() -> None:
    torch.manual_seed(0)
    scores = (
        torch.randn(1, 2, 5, 12, dtype=torch.float64) * 30
    )  # exponentials that would overflow fp32
    v = torch.randn(1, 2, 12, 3, dtype=torch.float64)
    want = (scores.softmax(-1) @ v).transpose(1, 2)

    def part(keys: slice) -> tuple[Tensor, Tensor]:
        s = scores[..., keys]
        out = (s.softmax(-1) @ v[:, :, keys]).transpose(1, 2)
        return out.float(), s.logsumexp(-1).float()

    out, lse = part(slice(0, 4))
    for keys in (slice(4, 5), slice(5, 12)):
        merge(out, lse, *part(keys))
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-5)


def test_the_error_of_merging_bf16_parts_does_not_grow_with_the_ring() -> None:
    torch.manual_seed(0)
    scores = torch.randn(1, 2, 16, 64, dtype=torch.float64)
    v = torch.randn(1, 2, 64, 8, dtype=torch.float64)
    want = (scores.softmax(-1) @ v).transpose(1, 2)
    errors = []
    for hops in (1, 2, 4, 8):
        total: tuple[Tensor, Tensor] | None = None
        for s, x in zip(scores.chunk(hops, -1), v.chunk(hops, 2), strict=True):
            part = (s.softmax(-1) @ x).transpose(1, 2).bfloat16(), s.logsumexp(-1).float()
            if total is None:
                total = part[0].float(), part[1]
            else:
                merge(*total, *part)
        assert total is not None
        errors.append(((total[0].bfloat16() - want).norm() / want.norm()).item())
    # Two roundings, of the parts and of the result, instead of one; but not one more per hop.
    assert errors[1] <= 2 * errors[0], errors
    assert max(errors[2:]) <= 1.1 * errors[1], errors
