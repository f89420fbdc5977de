"""Untied Ulysses (UPipe): Ulysses that works through a rank's heads a few at a time.

    Ulysses      q q q q | k | v | out out out out         all heads of the rank alive together
    UPipe        q | k | v | out                           those of one stage, then the next

The number of heads alive is untied from the number of heads a rank owns, so the buffers of attention
shrink by that factor, at the price of more and smaller exchanges. Ownership is Ulysses's own, sliced in
time: K and V of a group cross once and are kept for the stages that need them, and no weight or output
changes its order.
"""

from __future__ import annotations

from torchtitan_lc.attention.staged import StagedStrategy


class UPipe(StagedStrategy):
    """``heads_per_stage`` query heads per rank and stage; more are faster, fewer are leaner."""

    name = "upipe"
