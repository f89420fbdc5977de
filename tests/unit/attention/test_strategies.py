"""The choice of how many ranks exchange heads."""

from __future__ import annotations

import pytest

from torchtitan_lc.attention.base import AttentionShape, Peers
from torchtitan_lc.attention.kernels import Math
from torchtitan_lc.attention.strategies import best_ulysses_degree
from torchtitan_lc.attention.upipe import UPipe


@pytest.mark.parametrize(
    ("cp", "heads", "per_node", "degree"),
    [
        (8, (32, 8), 8, 8),
        (16, (32, 8), 8, 8),
        (8, (4, 4), 8, 4),  # no more ranks than heads
        (8, (14, 2), 8, 2),  # over 4 ranks 2 of 16 slots would be idle
        (8, (32, 8), 6, 2),  # groups of 4 would be ranks 0..3 and 4..7, on two nodes of 6
        (6, (12, 12), 4, 2),  # groups of 3 would be ranks 0..2 and 3..5, on two nodes of 4
        (3, (3, 3), 1, 1),
    ],
)
def test_the_exchange_is_as_wide_as_heads_and_a_node_allow(
    cp: int, heads: tuple[int, int], per_node: int, degree: int
) -> None:
    assert best_ulysses_degree(cp, *heads, per_node) == degree
    assert cp % degree == per_node % degree == 0


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(28, 4, 8), (9, 3, 2), (32, 8, 8)])
def test_all_ranks_count_the_same_bytes_for_what_a_layer_keeps(
    heads: int, kv_heads: int, ranks: int
) -> None:
    """Each plans from them which layers run attention again: ranks that differ would wait for ever."""
    shape = AttentionShape(heads, kv_heads, 64)
    kept = {
        UPipe(Math(), ulysses=Peers(ranks, rank)).kept_bytes(shape, 2, 128, 2)
        for rank in range(ranks)
    }
    most = -(-heads // ranks)
    assert kept == {2 * 128 * heads * 64 * 2 + 2 * 128 * ranks * most * 4}
