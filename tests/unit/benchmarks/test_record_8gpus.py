"""A visit to a large machine loses nothing, wastes nothing, and its tables say what was measured."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import limited, record_8gpus
from benchmarks.bench_train import peak_memory
from benchmarks.record_8gpus import Part, estimate, parser, parts, visit
from benchmarks.record_tables import long_table, loss_table, plan_table, speed_table, table

FACTS = {"script": "record_8gpus", "commit": "c0ffee", "date": "2026-12-01", "time": "10:00:00"}
PLAN = {"hardware": "h200_141gb", "seconds": 10.0, "allocated_gib": 20.0, "host_gib": 100.0}


def _spread(value: float) -> dict[str, float]:
    return {"median": value, "min": value, "max": value}


class Machine:
    """Stands for the GPUs: says of each part what it is told to, and remembers its time limit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any] = PLAN) -> None:
        self.limits: dict[str, float] = {}
        self.broken: set[str] = set()
        self.dies_at = ""
        monkeypatch.setattr(record_8gpus, "measure", self._measure)
        monkeypatch.setattr(record_8gpus, "planned", lambda part, args: dict(plan))
        facts = {**FACTS, "device": "NVIDIA H200"}
        monkeypatch.setattr(record_8gpus, "environment", lambda script: dict(facts))

    def _measure(self, part: Part, args: argparse.Namespace, limit: float) -> dict[str, Any]:
        if part.name == self.dies_at:
            raise KeyboardInterrupt
        self.limits[part.name] = limit
        if part.name in self.broken:
            return {**FACTS, "failed": "exit code 1: OutOfMemoryError"}
        if part.steps == 0:
            line = {"mib": 64, "gbps": _spread(325)}
            return {**FACTS, "device": "H200", "ranks": 8, "all_to_all": [line], "host_copies": {}}
        steps = [{"loss": 12.0, "time_s": 9.0}] * part.steps
        return {**FACTS, "tps": _spread(3000.0), "time_s": _spread(9.0), "steps": steps}


def _visit(folder: Path, *words: str) -> dict[str, Any]:
    args, extra = parser().parse_known_args(["--name", "r", "--out", str(folder), *words])
    return visit(args, extra)


def test_a_second_visit_runs_only_what_has_no_good_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    machine.broken = {"published_256K"}
    first = _visit(tmp_path, "--budget", "9999")
    everything = set(machine.limits)
    assert everything == set(first["parts"]) and len(first["visits"]) == 1
    assert first["parts"]["published_256K"]["failed"].endswith("OutOfMemoryError")
    assert json.loads((tmp_path / "r.json").read_text()) == {"name": "r", **first}
    machine.limits, machine.broken = {}, set()
    second = _visit(tmp_path, "--budget", "9999")
    assert set(machine.limits) == {"published_256K"} and len(second["visits"]) == 2
    assert "failed" not in second["parts"]["published_256K"]
    machine.limits = {}
    assert _visit(tmp_path, "--budget", "1", "--optimizer.lr=1e-5")["parts"] == second["parts"]
    _visit(tmp_path, "--budget", "9999", "--optimizer.lr=1e-5")
    assert set(machine.limits) == everything - {"exchange"}, "of other settings there is no result"


def test_what_would_not_end_in_time_is_left_for_later_and_a_shorter_part_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    # Each job with so many steps takes 40 s + 10 s a step: one step fits into 55 s, two do not.
    record = _visit(tmp_path, "--budget", "55")
    assert "lean_128K" not in machine.limits and {"exchange", "long_upipe_3M"} <= set(
        machine.limits
    )
    assert all(limit <= 55 for limit in machine.limits.values()), "no part outlasts the visit"
    assert record["parts"]["lean_128K"]["failed"] == "not tried yet"
    assert record["parts"]["lean_128K"]["plan"] == PLAN
    machine.limits = {}
    monkeypatch.setattr(record_8gpus, "planned", lambda part, args: {**PLAN, "seconds": 11.0})
    again = _visit(tmp_path, "--budget", "0")
    assert again["visits"] == record["visits"] and not machine.limits, "only planned, anew"
    assert again["parts"]["long_upipe_3M"]["plan"]["seconds"] == 11.0
    assert "failed" not in again["parts"]["long_upipe_3M"], "what was measured stays"


def test_a_part_has_a_time_limit_of_its_own_and_one_without_a_plan_runs_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    _visit(tmp_path, "--budget", "9999", "--parts", "lean_128K")
    assert machine.limits == {"lean_128K": 2 * (40 + 3 * 10) + 60}
    machine = Machine(monkeypatch, {"hardware": "h200_141gb", "error": "KeyError: 1"})
    record = _visit(tmp_path / "other", "--budget", "9999", "--parts", "lean_256K")
    assert machine.limits == {"lean_256K": 2 * 180 + 60}
    assert record["parts"]["lean_256K"]["plan"]["error"] == "KeyError: 1"
    with pytest.raises(SystemExit, match="no_such: no such part"):
        _visit(tmp_path, "--parts", "no_such")


def test_a_visit_that_is_cut_short_keeps_what_was_done_and_says_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    machine.dies_at = "lean_256K"
    with pytest.raises(KeyboardInterrupt):
        _visit(tmp_path, "--budget", "9999")
    found = json.loads((tmp_path / "r.json").read_text())["parts"]
    assert found["lean_128K"]["tps"]["median"] == 3000
    assert found["lean_256K"]["failed"] == "the visit was cut short while it ran"
    assert found["lean_512K"]["failed"] == "not tried yet"


def test_parts_are_those_of_the_issue_and_halves_go_round_a_ring() -> None:
    args, extra = parser().parse_known_args(["--name", "r", "--comm.trace_buf_size=0"])
    found = {part.name: part for part in parts(args, extra)}
    for schedule in ("lean", "published", "ulysses"):
        assert {f"{schedule}_{n}" for n in ("128K", "256K", "512K")} <= set(found)
    assert {"long_upipe_3M", "long_upipe_5M", "long_ulysses_3M", "long_ulysses_5M"} <= set(found)
    for name in ("usp", "upipe_ring"):
        flags = found[f"equal_{name}_256K"].flags
        assert "--parallelism.context_parallel_ulysses_degree=4" in flags
    assert all(part.flags[-1] == extra[0] for part in found.values() if part.steps)
    assert next(iter(found)) == "lean_128K"
    assert estimate(found["lean_128K"], PLAN) == 70 and estimate(found["exchange"], {}) == 45


def test_tables_set_figures_beside_published_and_planned_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch)
    record = _visit(tmp_path, "--budget", "9999")
    record["parts"]["lean_128K"]["memory"] = {"allocated_gib": 23.0, "host_gib": 110.0}
    lines = speed_table([record]).splitlines()
    assert "| 3000 (3000 to 3000) | 2320 | 1.29 | 23.0 |  | 110.0 |" in lines[2]
    record["parts"]["long_upipe_3M"]["memory"] = {"allocated_gib": 20.5, "host_gib": 120.0}
    lines = long_table([record]).splitlines()
    assert lines[2].startswith("| 3M | upipe | 20.50 | 20.00 | 120.00 | 100.00 | 1.025 |")
    rows = {row.split("`")[1]: row for row in plan_table([record]).splitlines()[2:]}
    assert set(rows) == {"lean_128K", "long_upipe_3M"}, "what ran and said its memory"
    assert rows["lean_128K"].endswith("| 23.00 | 20.00 | -13.0 % | 9.00 | 10.00 | +11.1 % |")
    record["parts"]["equal_usp_256K"]["steps"] = [{"loss": 12.0}, {"loss": 12.0}, {"loss": 12.003}]
    rows = {row.split("`")[1]: row for row in loss_table([record]).splitlines()[2:]}
    assert "NOT EQUAL: 3.0e-03" in rows["equal_usp_256K"]
    assert "| equal: 0.0e+00" in rows["equal_upipe_ring_256K"]
    record["parts"]["equal_ulysses_256K"]["failed"] = "exit code 1"
    assert loss_table([record]).count("no result") == 3, "nothing to compare with"
    record["ranks"] = 2
    assert "2320" not in speed_table([record]), "published are 8 GPUs"
    assert "325 (325 to 325)" in table([record])


def test_memory_is_that_of_the_fullest_gpu_and_of_all_ranks_on_the_host(tmp_path: Path) -> None:
    lines = ([(1.0, 7.0), (2.0, 5.0)], [(1.5, 6.0)])
    for rank, steps in enumerate(lines):
        text = "".join(json.dumps({"host_gib": h, "allocated_gib": a}) + "\n" for h, a in steps)
        (tmp_path / f"rank{rank}.jsonl").write_text(text)
    assert peak_memory(tmp_path) == {"host_gib": 3.5, "allocated_gib": 7.0}
    assert peak_memory(tmp_path / "none") == {}


def test_a_command_is_ended_at_its_limit_and_what_it_said_is_kept() -> None:
    code = "import time; print('began', flush=True); time.sleep(60)"
    ended = limited.run([sys.executable, "-c", code], {}, 3.0)
    assert ended.ended_early and ended.exit_code != 0 and ended.seconds < 30
    assert ended.output == "began\n"
    ended = limited.run([sys.executable, "-c", "import os; print(os.environ['X'])"], {"X": "1"}, 30)
    assert (ended.exit_code, ended.output, ended.ended_early) == (0, "1\n", False)
