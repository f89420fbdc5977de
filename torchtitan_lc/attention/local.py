"""Strategies that exchange no heads: one rank alone, the twin that all others must equal, or a ring."""

from __future__ import annotations

from torchtitan_lc.attention.base import Peers
from torchtitan_lc.attention.kernels import Kernel
from torchtitan_lc.attention.staged import StagedStrategy


class Local(StagedStrategy):
    """One rank, all heads at once, nothing exchanged."""

    name = "local"

    def __init__(self, kernel: Kernel, *, tile_tokens: int = 0) -> None:
        super().__init__(kernel, tile_tokens=tile_tokens)


class RingOnly(StagedStrategy):
    """Every rank keeps all heads of its own tokens; K and V of all heads go round the ring."""

    name = "ring"

    def __init__(self, kernel: Kernel, *, ring: Peers, tile_tokens: int = 0) -> None:
        super().__init__(kernel, ring=ring, tile_tokens=tile_tokens)
