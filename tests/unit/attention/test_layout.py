"""Which tokens a rank holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_lc.attention.layout import Layout


def test_every_tensor_of_a_batch_is_cut_along_tokens_and_comes_back_whole() -> None:
    batch = {"tokens": torch.arange(24).view(2, 12), "positions": torch.arange(24, 48).view(2, 12)}
    parts = [Layout(4).shard(batch, rank) for rank in range(4)]
    for name, whole in batch.items():
        assert torch.equal(torch.cat([p[name] for p in parts], dim=1), whole)
        assert all(p[name].is_contiguous() for p in parts)


def test_positions_of_a_later_rank_go_on_where_the_one_before_ends() -> None:
    positions = torch.arange(64).expand(1, 64)
    assert Layout(2).shard({"positions": positions}, 1)["positions"][0, 0] == 32


def test_no_label_is_lost_at_a_shards_edge() -> None:
    row = torch.arange(65)
    labels = row[1:].view(1, -1)
    seen = [Layout(4).shard({"labels": labels}, rank)["labels"] for rank in range(4)]
    assert torch.equal(torch.cat(seen, dim=1)[0], torch.arange(1, 65))


@pytest.mark.parametrize("shape", [(3, 2, 12), (2, 1, 12, 12), (12,)])
def test_a_tensor_whose_token_axis_is_a_guess_is_refused(shape: tuple[int, ...]) -> None:
    batch = {"tokens": torch.zeros(2, 12), "mask": torch.zeros(shape)}
    with pytest.raises(ValueError, match="mask"):
        Layout(2).shard(batch, 0)


@pytest.mark.parametrize(("seq_len", "layout"), [(63, (2, 1)), (64, (3, 1)), (36, (2, 4))])
def test_a_row_that_cannot_be_cut_evenly_is_refused_with_a_length_that_can(
    seq_len: int, layout: tuple[int, int]
) -> None:
    with pytest.raises(ValueError) as error:
        Layout(*layout).check(seq_len)
    near = -(-seq_len // Layout(*layout).multiple) * Layout(*layout).multiple
    for word in (seq_len, *layout, near):
        assert str(word) in str(error.value)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_parts_of_all_ranks_are_the_row_once_and_come_back_in_order(
    ulysses: int, ring: int, times: int
) -> None:
    layout = Layout(ulysses, ring)
    row = torch.arange(layout.multiple * times).view(1, -1)
    parts = [layout.shard({"tokens": row}, rank)["tokens"] for rank in range(layout.ranks)]
    assert len({part.shape for part in parts}) == 1
    assert torch.equal(layout.unshard(parts), row)


def test_ulysses_ranks_cut_what_their_ring_rank_holds_in_zigzag() -> None:
    layout = Layout(ulysses=2, ring=2)
    row = torch.arange(8).view(1, -1)
    parts = [layout.shard({"tokens": row}, rank)["tokens"][0].tolist() for rank in range(4)]
    assert parts == [[0, 1], [6, 7], [2, 3], [4, 5]]
