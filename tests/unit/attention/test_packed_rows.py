"""Tiles written to and read from a packed buffer: a block of heads for each owner."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_lc.attention.comm import HeadExchange

BATCH, TOKENS, HEAD_DIM = 2, 5, 4


class Copies(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("counts", "copies"), [((3, 3), 1), ((1, 1, 1, 1), 1), ((2, 1, 0), 2), ((2,), 1)]
)
def test_rows_land_with_their_owner_and_come_back_in_as_few_kernels_as_can_be(
    counts: tuple[int, ...], copies: int
) -> None:
    exchange = HeadExchange(counts, 0, BATCH, TOKENS, HEAD_DIM, None)
    x = torch.randn(BATCH, TOKENS, sum(counts), HEAD_DIM)
    packed = exchange.new_packed(x)
    for start, stop in ((0, 2), (2, 4), (4, 5)):
        with Copies() as seen:
            exchange.write_rows(packed, start, x[:, start:stop])
        assert seen.count == copies
        assert torch.equal(exchange.read_rows(packed, start, stop), x[:, start:stop])
    for block, part in zip(exchange.blocks(packed), x.split(counts, dim=2), strict=True):
        assert torch.equal(block, part)
