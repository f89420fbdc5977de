"""The exchange of heads: a round trip is the identity, for any rows, counts and idle ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.helpers import run_distributed
from torchtitan_lc.attention.comm import HeadExchange

T, D = 5, 3


def _round_trip(rank: int, world_size: int) -> None:
    uneven = (*range(1, world_size), 0) if world_size > 1 else (3,)
    for counts in [(2,) * world_size, (1,) * world_size, uneven]:
        for batch in (1, 2, 3):
            exchange = HeadExchange(counts, rank, batch, T, D, dist.group.WORLD)
            heads = sum(counts)
            # Every value says which row, token and head it is.
            token = torch.arange(world_size * T).view(1, -1, 1, 1)
            row = torch.arange(batch).view(-1, 1, 1, 1)
            head = torch.arange(heads).view(1, 1, -1, 1)
            whole = (row * 10_000 + token * 100 + head).expand(batch, -1, heads, D).double()
            mine = whole[:, rank * T : (rank + 1) * T]
            packed = exchange.new_packed(mine)
            packed.fill_(float("nan"))
            for start in range(0, T, 2):  # tiles: strided views of a wider tensor
                exchange.write_rows(packed, start, mine[:, start : start + 2])
            assert torch.equal(exchange.read_rows(packed, 1, 4), mine[:, 1:4])
            received = exchange.seq_to_heads(packed).arrive()
            first = sum(counts[:rank])
            assert torch.equal(received, whole[:, :, first : first + counts[rank]])
            assert torch.equal(exchange.heads_to_seq(received).arrive(), packed)
            # What a kernel returns may be strided: the code that sends makes it contiguous.
            strided = received.transpose(1, 2).contiguous().transpose(1, 2)
            assert torch.equal(exchange.heads_to_seq(strided).arrive(), packed)


def test_tokens_and_heads_arrive_in_order_and_come_back() -> None:
    for world_size in (1, 2, 3):
        run_distributed(_round_trip, world_size)


def _one_row(rank: int, world_size: int) -> None:
    exchange = HeadExchange((2, 2), rank, 1, T, D, dist.group.WORLD)
    sent = torch.randn(exchange.packed_numel)
    heads = exchange.seq_to_heads(sent).arrive()
    # A buffer of the received size and nothing more: the whole sequence, in order, without a copy.
    assert heads.is_contiguous()
    assert heads.untyped_storage().nbytes() == heads.numel() * 4


def test_one_row_needs_no_copy_after_the_exchange() -> None:
    run_distributed(_one_row, 2)
