"""Which rank computes which heads at which stage. Pure: no tensors, no process groups.

    H = 8 query heads, K = 4 KV heads, U = 2 ranks, heads_per_stage = 1

              stage 0    stage 1    stage 2    stage 3
    rank 0    q0         q1         q2         q3          owns q0..q3 (as Ulysses would give it)
              kv0 in                kv1 in                 each KV head crosses once, kept for its group
    rank 1    q4         q5         q6         q7
              kv2 in                kv3 in

Ulysses is the plan with a single stage; Untied Ulysses (UPipe) slices the same ownership in time.
Query head h always meets KV head h // (H / K), so weights keep the Hugging Face order.

Letters: H query heads, K KV heads, U ranks of the exchange, g = H / K.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

Heads = tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """One kernel call: query heads ``[q_start, q_stop)`` of the stage (indices into the rank's own
    heads of that stage) on KV heads ``[kv_start, kv_stop)`` of those that arrived with stage
    ``arrival``. Every KV head serves the same number of query heads."""

    q_start: int
    q_stop: int
    arrival: int
    kv_start: int
    kv_stop: int


@dataclass(frozen=True)
class Stage:
    """What happens at one stage; every tuple is indexed by the rank within the exchange group.

    q_heads: query heads that the rank computes.
    kv_heads: KV heads that arrive there now (empty where it already holds what it needs).
    segments: the rank's kernel calls.
    releases: earlier (or this) stages whose arrived K/V no rank needs after this stage.
    """

    q_heads: tuple[Heads, ...]
    kv_heads: tuple[Heads, ...]
    segments: tuple[tuple[Segment, ...], ...]
    releases: tuple[int, ...]

    @property
    def arrivals(self) -> tuple[int, ...]:
        """The stages with which the K/V arrived that some rank uses here."""
        return tuple(sorted({seg.arrival for segments in self.segments for seg in segments}))

    @property
    def all_q_heads(self) -> Heads:
        """Query heads of the stage, owner by owner: the order in which they are projected and sent."""
        return tuple(h for heads in self.q_heads for h in heads)

    @property
    def all_kv_heads(self) -> Heads:
        """KV heads of the stage, receiver by receiver; a head that several ranks need appears for each."""
        return tuple(h for heads in self.kv_heads for h in heads)


@dataclass(frozen=True)
class HeadPlan:
    n_heads: int
    n_kv_heads: int
    ranks: int
    heads_per_stage: int
    stages: tuple[Stage, ...]

    @property
    def slots(self) -> int:
        """Places for a query head over all ranks and stages; idle ones cost time, not correctness."""
        return sum(self.ranks * max(len(q) for q in stage.q_heads) for stage in self.stages)

    @property
    def idle_slots(self) -> int:
        return self.slots - self.n_heads


def owned_heads(n_heads: int, ranks: int) -> tuple[Heads, ...]:
    """Query heads of each rank: consecutive, the first ``n_heads % ranks`` ranks own one more."""
    small, extra = divmod(n_heads, ranks)
    starts = [rank * small + min(rank, extra) for rank in range(ranks + 1)]
    return tuple(tuple(range(starts[r], starts[r + 1])) for r in range(ranks))


@lru_cache(maxsize=64)
def plan_heads(
    n_heads: int, n_kv_heads: int, ranks: int, heads_per_stage: int | None = None
) -> HeadPlan:
    """Plan the exchange of ``n_heads`` query and ``n_kv_heads`` KV heads over ``ranks`` ranks.

    heads_per_stage: query heads per rank and stage; None takes all of a rank's heads at once (Ulysses).
    Raises ValueError where no plan exists: query heads not a multiple of KV heads, more ranks than
    query heads, numbers below one.
    """
    if min(n_heads, n_kv_heads, ranks) < 1 or (heads_per_stage is not None and heads_per_stage < 1):
        raise ValueError(
            f"heads, ranks and heads_per_stage must be at least 1, got n_heads={n_heads}, "
            f"n_kv_heads={n_kv_heads}, ranks={ranks}, heads_per_stage={heads_per_stage}"
        )
    if n_heads % n_kv_heads:
        raise ValueError(
            f"{n_heads} query heads cannot share {n_kv_heads} KV heads evenly: "
            "the number of query heads must be a multiple of the number of KV heads"
        )
    if ranks > n_heads:
        raise ValueError(
            f"{ranks} ranks exchange heads, but there are only {n_heads} query heads: "
            f"set parallelism.context_parallel_ulysses_degree to at most {n_heads}"
        )
    owned = owned_heads(n_heads, ranks)
    width = min(heads_per_stage or len(owned[0]), len(owned[0]))
    n_stages = -(-len(owned[0]) // width)
    q_heads = [
        tuple(heads[s * width : (s + 1) * width] for heads in owned) for s in range(n_stages)
    ]
    group = n_heads // n_kv_heads

    # kv_heads[s][r]: KV heads that rank r needs at stage s and has not met before. Its query heads
    # are consecutive, so a KV head is needed over consecutive stages and has to cross only once.
    seen: list[dict[int, int]] = [{} for _ in range(ranks)]  # KV head -> stage of arrival
    kv_heads: list[tuple[Heads, ...]] = []
    last_use = [0] * n_stages
    for s, stage_heads in enumerate(q_heads):
        arrivals = []
        for rank, heads in enumerate(stage_heads):
            needed = [kv for kv, _ in groupby(h // group for h in heads)]
            arrivals.append(tuple(kv for kv in needed if kv not in seen[rank]))
            for kv in needed:
                arrived = seen[rank].setdefault(kv, s)
                last_use[arrived] = max(last_use[arrived], s)
        kv_heads.append(tuple(arrivals))

    stages = tuple(
        Stage(
            q_heads=q_heads[s],
            kv_heads=kv_heads[s],
            segments=tuple(
                _segments(q_heads[s][r], group, seen[r], [heads[r] for heads in kv_heads])
                for r in range(ranks)
            ),
            releases=tuple(a for a in range(s + 1) if any(kv_heads[a]) and last_use[a] == s),
        )
        for s in range(n_stages)
    )
    return HeadPlan(n_heads, n_kv_heads, ranks, width, stages)


def _segments(
    heads: Heads, group: int, seen: dict[int, int], arrivals: list[Heads]
) -> tuple[Segment, ...]:
    """Kernel calls for one rank's heads of a stage: neighbouring KV heads that arrived together and
    serve equally many query heads share a call, others get their own."""
    calls: list[Segment] = []
    position = 0
    for kv, members in groupby(heads, key=lambda h: h // group):
        count = len(list(members))
        arrival = seen[kv]
        index = arrivals[arrival].index(kv)
        last = calls[-1] if calls else None
        if (
            last is not None
            and last.arrival == arrival
            and last.kv_stop == index
            and (last.q_stop - last.q_start) == count * (last.kv_stop - last.kv_start)
        ):
            calls[-1] = Segment(last.q_start, position + count, arrival, last.kv_start, index + 1)
        else:
            calls.append(Segment(position, position + count, arrival, index, index + 1))
        position += count
    return tuple(calls)


def runs(heads: Heads) -> list[tuple[int, int]]:
    """Consecutive stretches of ``heads`` as (first head, how many): slices instead of an index tensor,
    so that picking weights never copies an index to the device."""
    stretches: list[tuple[int, int]] = []
    for head in heads:
        if stretches and sum(stretches[-1]) == head:
            stretches[-1] = (stretches[-1][0], stretches[-1][1] + 1)
        else:
            stretches.append((head, 1))
    return stretches
