"""Ulysses context parallelism (Jacobs et al., DeepSpeed-Ulysses, arXiv 2309.14509).

    before               each of U ranks holds T = S/U tokens of all H heads
    one exchange         each rank holds all S tokens of its own H/U heads, and attends alone
    one exchange back    T tokens of all heads

Fastest where memory allows: q, k, v and out of all of a rank's heads are alive at once.
"""

from __future__ import annotations

import torch.distributed as dist

from torchtitan_lc.attention.kernels import Kernel
from torchtitan_lc.attention.staged import StagedStrategy


class Ulysses(StagedStrategy):
    """``group`` exchanges heads; every rank works on all of its heads in a single stage."""

    name = "ulysses"

    def __init__(
        self,
        kernel: Kernel,
        *,
        ranks: int,
        rank: int,
        group: dist.ProcessGroup | None,
        tile_tokens: int = 0,
    ) -> None:
        super().__init__(kernel, ranks=ranks, rank=rank, group=group, tile_tokens=tile_tokens)
