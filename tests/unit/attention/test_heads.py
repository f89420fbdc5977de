"""The head plan, for any number of heads and ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_lc.attention.heads import HeadPlan, owned_heads, plan_heads, runs


@st.composite
def plans(draw: st.DrawFn) -> HeadPlan:
    n_kv_heads = draw(st.integers(1, 9))
    n_heads = n_kv_heads * draw(st.integers(1, 8))
    ranks = draw(st.integers(1, min(n_heads, 16)))
    width = draw(st.none() | st.integers(1, 9))
    return plan_heads(n_heads, n_kv_heads, ranks, width)


@given(plans())
@settings(max_examples=100, deadline=None)
def test_every_query_head_is_computed_exactly_once(plan: HeadPlan) -> None:
    computed = [h for stage in plan.stages for heads in stage.q_heads for h in heads]
    assert sorted(computed) == list(range(plan.n_heads))


@given(plans())
@settings(max_examples=100, deadline=None)
def test_every_query_head_meets_its_own_kv_head_while_it_is_held(plan: HeadPlan) -> None:
    group = plan.n_heads // plan.n_kv_heads
    for rank in range(plan.ranks):
        held: set[int] = set()
        for index, stage in enumerate(plan.stages):
            if any(stage.kv_heads):
                held.add(index)
            met: list[tuple[int, int]] = []
            for seg in stage.segments[rank]:
                assert seg.arrival in held
                q = stage.q_heads[rank][seg.q_start : seg.q_stop]
                kv = plan.stages[seg.arrival].kv_heads[rank][seg.kv_start : seg.kv_stop]
                assert len(q) % len(kv) == 0
                share = len(q) // len(kv)
                met += [(h, kv[i // share]) for i, h in enumerate(q)]
            assert met == [(h, h // group) for h in stage.q_heads[rank]]
            held -= set(stage.releases)
        assert not held, "K/V kept beyond the last stage"


@given(plans())
@settings(max_examples=100, deadline=None)
def test_a_kv_head_crosses_once_to_each_rank_that_needs_it(plan: HeadPlan) -> None:
    group = plan.n_heads // plan.n_kv_heads
    for rank in range(plan.ranks):
        arrived = [kv for stage in plan.stages for kv in stage.kv_heads[rank]]
        needed = {h // group for stage in plan.stages for h in stage.q_heads[rank]}
        assert sorted(arrived) == sorted(needed)


@given(plans())
@settings(max_examples=60, deadline=None)
def test_no_rank_works_on_more_heads_than_a_stage_has(plan: HeadPlan) -> None:
    for stage in plan.stages:
        assert max(len(heads) for heads in stage.q_heads) <= plan.heads_per_stage
    assert plan.idle_slots == plan.slots - plan.n_heads >= 0


def test_ownership_is_that_of_ulysses_and_uneven_heads_differ_by_one() -> None:
    assert owned_heads(8, 4) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert [len(heads) for heads in owned_heads(28, 8)] == [4, 4, 4, 4, 3, 3, 3, 3]


def test_idle_slots_of_28_heads_on_8_ranks_are_counted() -> None:
    plan = plan_heads(28, 4, 8, 1)
    assert (plan.idle_slots, plan.slots) == (4, 32)


def test_kv_of_a_group_arrives_once_for_the_stages_that_share_it() -> None:
    plan = plan_heads(32, 8, 8, 1)  # Llama 3 8B on 8 ranks: 4 heads of one group per rank
    assert [any(stage.kv_heads) for stage in plan.stages] == [True, False, False, False]
    assert [stage.releases for stage in plan.stages] == [(), (), (), (0,)]


def test_fewer_kv_heads_than_ranks_are_replicated_to_those_that_need_them() -> None:
    plan = plan_heads(8, 2, 4)
    assert plan.stages[0].kv_heads == ((0,), (0,), (1,), (1,))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((12, 8, 2), ("12", "8", "multiple")),  # 1.5 query heads per KV head
        ((4, 2, 8), ("8 ranks", "4 query heads")),
        ((4, 0, 2), ("n_kv_heads=0",)),
        ((4, 2, 2, 0), ("heads_per_stage=0",)),
    ],
)
def test_heads_that_cannot_be_planned_are_refused_with_the_numbers(
    args: tuple[int, ...], words: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as error:
        plan_heads(*args)
    assert all(word in str(error.value) for word in words), error.value


def test_runs_are_the_consecutive_stretches() -> None:
    assert runs((0, 1, 4, 5, 6, 2)) == [(0, 2), (4, 3), (2, 1)]
    assert runs(()) == []
