"""Traffic, host memory, and extrapolation over layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.meters import HostUse, Traffic, exchange_gbps, extrapolated
from benchmarks.shapes import answering
from tests.helpers import run_distributed
from torchtitan_lc.memory.host_memory import HostMemory


def _traffic(rank: int, ranks: int) -> tuple[int, int]:
    traffic = Traffic()
    whole, part = torch.zeros(ranks * 10), torch.zeros(10)
    with traffic.counting():
        dist.all_to_all_single(torch.empty_like(whole), whole)
        dist.all_gather_into_tensor(output_tensor=whole, input_tensor=part)
        dist.reduce_scatter_tensor(part, whole)
    dist.all_to_all_single(torch.empty_like(whole), whole)  # not counted any more
    return traffic.exchange, traffic.fsdp


def test_bytes_that_leave_a_rank_are_counted() -> None:
    own = 10 * 4
    for exchange, fsdp in run_distributed(_traffic, 4):
        assert exchange == 3 * own
        assert fsdp == 3 * own + 3 * own


def test_host_memory_is_what_is_held_at_once_even_where_buffers_are_shared() -> None:
    use, memory = HostUse(), HostMemory(torch.device("cpu"), shared=True)
    with use.counting():
        held = [memory.take(100), memory.take(100)]
        memory.give(held.pop())
        memory.take(50)
    assert (use.peak, use.now) == (200, 150)
    assert memory.allocated == 150


def test_silent_peers_are_answered_for() -> None:
    calls = []

    def silent(output: torch.Tensor, input: torch.Tensor, group: object = None) -> str:
        calls.append(group)
        return "work"

    sent, arrived, part = torch.arange(4.0), torch.zeros(8), torch.zeros(2)
    assert answering(silent)(arrived, input=sent, group="g") == "work"
    assert answering(silent)(part, sent) == "work"
    assert arrived.tolist() == [0, 1, 2, 3, 0, 1, 2, 3] and part.tolist() == [0, 1]
    assert calls == ["g", None]


def test_the_rate_is_a_number_or_that_of_the_largest_exchange(tmp_path: Path) -> None:
    lines = [{"mib": m, "gbps": {"median": 100.0 + m}} for m in (64, 1024, 256)]
    file = tmp_path / "e.json"
    file.write_text(json.dumps({"all_to_all": lines}))
    assert exchange_gbps(str(file)) == 1124.0
    assert exchange_gbps("325") == 325.0


def test_time_of_all_layers_follows_from_two_cuts() -> None:
    assert extrapolated({2: [5.0, 5.0, 9.0], 4: [7.0]}, 32) == pytest.approx(35.0)  # 3 + 32
    assert extrapolated({4: [7.0]}, 32) is None
