"""Cases take turns, fail alone, and are compared turn by turn."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.block_runs import _compare
from benchmarks.timing import Case, measure
from tests.helpers import run_distributed

CPU = torch.device("cpu")


def _measured(rank: int, ranks: int) -> tuple[list[str], dict[str, Any]]:
    order: list[str] = []

    def case(name: str, fails_at: int = -1) -> Case:
        def step() -> None:
            order.append(name)
            if order.count(name) == fails_at:
                raise MemoryError("none left")

        return Case({"name": name}, step, lambda: None, lambda: None, unit=1)

    # One fails on rank 1 alone: nobody may wait for it.
    cases = [case("a"), case("b", fails_at=3 if rank == 1 else -1), case("c")]
    measure(cases, repeats=3, device=CPU, warm=True)
    return order, {c.result["name"]: c.result for c in cases}


def test_cases_take_turns_and_one_that_fails_leaves_them_on_every_rank() -> None:
    orders, results = zip(*run_distributed(_measured, 2), strict=True)
    warm_up_and_memory = ["a", "a", "b", "b", "c", "c"]
    assert orders[0] == orders[1] == [*warm_up_and_memory, *"abc", *"ac", *"ac"]
    assert "failed on another rank" in results[0]["b"]["error"]
    assert results[1]["b"]["error"] == "MemoryError: none left"
    for found in results:
        assert found["a"]["seconds"]["median"] > 0 and "first_seconds" in found["a"]
        assert "seconds" not in found["b"]
    assert results[0]["a"]["seconds"] == results[1]["a"]["seconds"], "the slowest rank's, on both"


def test_a_ratio_above_one_means_that_the_other_took_longer_in_the_same_turn() -> None:
    def case(kind: str, seconds: list[float]) -> Case:
        result = {"kind": kind, "strategy": kind, "kernel": "k"}
        return Case(result, lambda: None, lambda: None, lambda: None, 1, seconds)

    ours, other = case("ours", [1.0, 2.0, 4.0]), case("published", [2.0, 6.0, 8.0])
    _compare([ours, other])
    ratios = {"published, k": {"median": 2.0, "min": 2.0, "max": 3.0}}
    assert ours.result["time_of_others"] == ratios
    assert "time_of_others" not in other.result
