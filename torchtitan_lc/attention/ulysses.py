"""Ulysses context parallelism (Jacobs et al., DeepSpeed-Ulysses, arXiv 2309.14509).

    before               each of U ranks holds T = S/U tokens of all H heads
    one exchange         each rank holds all S tokens of its own H/U heads, and attends alone
    one exchange back    T tokens of all heads

Fastest where memory allows: q, k, v and out of all of a rank's heads are alive at once. Around a ring
it is USP (Fang and Zhao, arXiv 2405.07719): heads are exchanged among neighbours, K and V go round.
"""

from __future__ import annotations

from torchtitan_lc.attention.staged import StagedStrategy


class Ulysses(StagedStrategy):
    """Every rank works on all of its heads in a single stage: no heads_per_stage."""

    name = "ulysses"
