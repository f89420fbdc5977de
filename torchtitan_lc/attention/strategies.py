"""The strategies by name. A strategy's place among its ranks is passed in: without a group it can be
asked what it can do, not run over several ranks."""

from __future__ import annotations

import torch.distributed as dist

from torchtitan_lc.attention.kernels import Kernel
from torchtitan_lc.attention.local import Local
from torchtitan_lc.attention.staged import StagedStrategy
from torchtitan_lc.attention.ulysses import Ulysses
from torchtitan_lc.attention.upipe import UPipe


def make_strategy(
    name: str,
    kernel: Kernel,
    *,
    ranks: int,
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
    heads_per_stage: int = 1,
    tile_tokens: int = 0,
) -> StagedStrategy:
    """Raises ValueError for a name that is no strategy, and for `local` over several ranks."""
    if name == "local":
        if ranks > 1:
            raise ValueError(f"attention.strategy = 'local' cannot spread a row over {ranks} ranks")
        return Local(kernel, tile_tokens=tile_tokens)
    if name == "ulysses":
        return Ulysses(kernel, ranks=ranks, rank=rank, group=group, tile_tokens=tile_tokens)
    if name == "upipe":
        return UPipe(
            kernel,
            ranks=ranks,
            rank=rank,
            group=group,
            heads_per_stage=heads_per_stage,
            tile_tokens=tile_tokens,
        )
    raise ValueError(f"attention.strategy = {name!r} is none of: local, ulysses, upipe")
