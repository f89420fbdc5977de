"""The strategies by name. A strategy's place among its ranks is passed in: without groups it can be
asked what it can do, not run over several ranks."""

from __future__ import annotations

from typing import Any

from torchtitan_lc.attention.base import ALONE, Peers
from torchtitan_lc.attention.heads import plan_heads
from torchtitan_lc.attention.kernels import Kernel
from torchtitan_lc.attention.local import Local, RingOnly
from torchtitan_lc.attention.staged import StagedStrategy
from torchtitan_lc.attention.ulysses import Ulysses
from torchtitan_lc.attention.upipe import UPipe


def make_strategy(
    name: str,
    kernel: Kernel,
    *,
    ulysses: Peers = ALONE,
    ring: Peers = ALONE,
    heads_per_stage: int = 1,
    tile_tokens: int = 0,
    hold_normed_input: bool = False,
    sum_kv_gradients: bool = True,
    overlap_exchange: bool = False,
) -> StagedStrategy:
    """Raises ValueError for a name that is no strategy, and for ranks that the strategy cannot use."""
    common: dict[str, Any] = {
        "tile_tokens": tile_tokens,
        "hold_normed_input": hold_normed_input,
        "sum_kv_gradients": sum_kv_gradients,
        "overlap_exchange": overlap_exchange,
    }
    if name == "local":
        if ulysses.ranks * ring.ranks > 1:
            raise ValueError(
                "attention.strategy = 'local' cannot spread a row over "
                f"{ulysses.ranks * ring.ranks} ranks: choose ulysses, upipe or ring"
            )
        return Local(kernel, **common)
    if name == "ring":
        if ulysses.ranks > 1:
            raise ValueError(
                f"attention.strategy = 'ring' exchanges no heads, but the Ulysses degree is "
                f"{ulysses.ranks}: choose ulysses (USP) or upipe, or set "
                "parallelism.context_parallel_ulysses_degree to 1"
            )
        return RingOnly(kernel, ring=ring, **common)
    if name == "ulysses":
        return Ulysses(kernel, ulysses=ulysses, ring=ring, **common)
    if name == "upipe":
        return UPipe(kernel, ulysses=ulysses, ring=ring, heads_per_stage=heads_per_stage, **common)
    raise ValueError(f"attention.strategy = {name!r} is none of: local, ulysses, upipe, ring")


def best_ulysses_degree(cp: int, n_heads: int, n_kv_heads: int, ranks_per_node: int) -> int:
    """The largest Ulysses degree that divides ``cp``, stays inside a node and wastes little.

    Exchanging heads moves less than passing K and V round, so the degree is as large as heads allow;
    but an idle slot costs its share of all attention time, so at most one in sixteen may be idle.
    The ranks of an exchange are neighbours, beginning at a multiple of the degree; so they are all on
    one node where the degree divides the node's ranks too.
    """
    for degree in range(min(cp, n_heads, ranks_per_node), 1, -1):
        if cp % degree or ranks_per_node % degree:
            continue
        plan = plan_heads(n_heads, n_kv_heads, degree, 1)
        if 16 * plan.idle_slots <= plan.slots:
            return degree
    return 1
