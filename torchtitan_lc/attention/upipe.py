"""Untied Ulysses (UPipe): Ulysses that works through a rank's heads a few at a time.

    Ulysses      q q q q | k | v | out out out out         all heads of the rank alive together
    UPipe        q | k | v | out                           those of one stage, then the next

The number of heads alive is untied from the number of heads a rank owns, so the buffers of attention
shrink by that factor, at the price of more and smaller exchanges. Ownership is Ulysses's own, sliced in
time: K and V of a group cross once and are kept for the stages that need them, and no weight or output
changes its order.
"""

from __future__ import annotations

from torchtitan_lc.attention.base import ALONE, Peers
from torchtitan_lc.attention.kernels import Kernel
from torchtitan_lc.attention.staged import StagedStrategy


class UPipe(StagedStrategy):
    """``heads_per_stage`` query heads per rank and stage; more are faster, fewer are leaner."""

    name = "upipe"

    def __init__(
        self,
        kernel: Kernel,
        *,
        ulysses: Peers,
        ring: Peers = ALONE,
        heads_per_stage: int,
        tile_tokens: int = 0,
    ) -> None:
        super().__init__(
            kernel,
            ulysses=ulysses,
            ring=ring,
            heads_per_stage=heads_per_stage,
            tile_tokens=tile_tokens,
        )
