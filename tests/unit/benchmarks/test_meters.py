"""Traffic, and extrapolation over layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.meters import Traffic, exchange_gbps, extrapolated
from tests.helpers import run_distributed


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


def test_the_rate_is_a_number_or_that_of_the_largest_exchange(tmp_path: Path) -> None:
    lines = [{"mib": m, "gbps": {"median": 100.0 + m}} for m in (64, 1024, 256)]
    file = tmp_path / "e.json"
    file.write_text(json.dumps({"all_to_all": lines}))
    assert exchange_gbps(str(file)) == 1124.0
    assert exchange_gbps("325") == 325.0


def test_time_of_all_layers_follows_from_two_cuts() -> None:
    assert extrapolated({2: [5.0, 5.0, 9.0], 4: [7.0]}, 32) == pytest.approx(35.0)  # 3 + 32
    assert extrapolated({4: [7.0]}, 32) is None
