"""Attention of a row that one rank holds whole; also the twin that every other strategy must equal."""

from __future__ import annotations

from torchtitan_lc.attention.kernels import Kernel
from torchtitan_lc.attention.staged import StagedStrategy


class Local(StagedStrategy):
    """One rank, all heads at once, nothing exchanged."""

    name = "local"

    def __init__(self, kernel: Kernel, *, tile_tokens: int = 0) -> None:
        super().__init__(kernel, tile_tokens=tile_tokens)
