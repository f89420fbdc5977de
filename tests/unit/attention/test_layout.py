"""Which tokens a rank holds."""

from __future__ import annotations

import pytest
import torch

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


@pytest.mark.parametrize(("seq_len", "ranks", "near"), [(63, 2, "62 or 64"), (64, 3, "63 or 66")])
def test_a_row_that_cannot_be_cut_evenly_is_refused_with_lengths_that_can(
    seq_len: int, ranks: int, near: str
) -> None:
    with pytest.raises(ValueError) as error:
        Layout(ranks).check(seq_len)
    for word in (str(seq_len), str(ranks), near):
        assert word in str(error.value)
