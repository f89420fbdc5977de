"""What an exchange holds. Where exchanges overlap, what is sent stays until they have ended."""

from __future__ import annotations

from torchtitan_lc.attention.buffers.sizes import Sizes
from torchtitan_lc.attention.heads import Heads
from torchtitan_lc.tools.ledger import Ledger


def seq_to_heads(ledger: Ledger, s: Sizes, name: str, heads: tuple[Heads, ...]) -> None:
    """HeadExchange.seq_to_heads."""
    if s.exchanges:
        ledger.take(name, s.mine(heads))
        ledger.free(name, 0 if s.overlaps else s.packed(heads))


def heads_arrive(ledger: Ledger, s: Sizes, name: str, heads: tuple[Heads, ...]) -> None:
    """Travelling.arrive of what `seq_to_heads` has sent."""
    if s.overlaps:
        ledger.free(name, s.packed(heads))
    ledger.moment(exchange=s.copies * s.mine(heads))


def heads_to_seq(ledger: Ledger, s: Sizes, name: str, heads: tuple[Heads, ...]) -> None:
    """HeadExchange.heads_to_seq."""
    if s.exchanges:
        with ledger.during(exchange=s.copies * s.mine(heads)):
            ledger.take(name, s.packed(heads))
        ledger.free(name, 0 if s.overlaps else s.mine(heads))


def seq_arrives(ledger: Ledger, s: Sizes, name: str, heads: tuple[Heads, ...]) -> None:
    """Travelling.arrive of what `heads_to_seq` has sent."""
    if s.overlaps:
        ledger.free(name, s.mine(heads))
