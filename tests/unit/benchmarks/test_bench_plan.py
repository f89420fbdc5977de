"""bench_plan.py: dry runs of several jobs, one after another, in one record."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import bench_plan

ALL = (
    *("--plan.hardware=h100_80gb", "--plan.gpus_per_node=8"),
    *("--parallelism.context_parallel_degree=8", "--activation_offload.enable"),
)


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *cases: tuple[str, str]) -> dict:
    words = [word for case in cases for word in ("--case", *case)]
    monkeypatch.setattr(sys, "argv", ["", "--name", "x", "--out", str(folder), *words, *ALL])
    bench_plan.main()
    found: dict = json.loads((folder / "x.json").read_text())
    return found


def test_each_case_is_measured_beside_its_plan_and_a_refused_one_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(
        tmp_path,
        monkeypatch,
        ("short", "debug.toml --training.seq_len=512"),
        ("typing error", "debug.toml --model.flavor=9B"),
        ("longer", "debug.toml --training.seq_len=4K --attention.strategy=ulysses"),
    )
    short, wrong, longer = found["cases"]
    assert found["script"] == "bench_plan" and wrong["case"] == "typing error"
    assert "9B" in wrong["error"]
    assert short["layers"] == {"selective": 3} and longer["strategy"] == "ulysses"
    for case in (short, longer):
        assert case["fits"] and case["flags"][-1] == "--activation_offload.enable"
        peak = case["figures"]["peak allocated"]
        assert abs(peak["plan_off_by_percent"]) < 3
        assert bench_plan.host_gib(case) > 0
    peaks = [bench_plan.gib(case, "peak allocated") or 0 for case in (short, longer)]
    assert 0 < peaks[0] < peaks[1]
    table = (tmp_path / "x.md").read_text()
    assert "| typing error |  | UserError" in table and "| longer | 4K |" in table
