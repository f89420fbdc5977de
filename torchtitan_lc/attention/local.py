"""Strategies that exchange no heads: one rank alone, the twin that all others must equal, or a ring."""

from __future__ import annotations

from torchtitan_lc.attention.staged import StagedStrategy


class Local(StagedStrategy):
    """One rank, all heads at once, nothing exchanged."""

    name = "local"


class RingOnly(StagedStrategy):
    """Every rank keeps all heads of its own tokens; K and V of all heads go round the ring."""

    name = "ring"
