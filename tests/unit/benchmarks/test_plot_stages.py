"""The trade-off between time and memory as bench_block.py measured it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.plot_stages import draw, points


def _case(strategy: str, seconds: float, peak: float, **fields: Any) -> dict[str, Any]:
    labels = {"kind": "ours", "strategy": strategy, "seq_len": 1024}
    return {**labels, "seconds": {"median": seconds}, "peak_b": peak, **fields}


def test_a_point_is_the_fastest_case_of_a_strategy(tmp_path: Path) -> None:
    cases = [
        _case("upipe:1", 2.2, 5.5),
        _case("upipe:1", 2.1, 5.6),
        _case("upipe:4", 2.0, 8.0),
        _case("ulysses", 2.0, 10.0),
        _case("ring", 1.0, 1.0),
        _case("published", 1.0, 1.0, kind="published"),
        _case("upipe:2", 0.1, 0.1, error="out of memory"),
    ]
    found = points({"cases": cases})
    assert found == {1024: [(5.6, 1.05, "1"), (8.0, 1.0, "4"), (10.0, 1.0, "all")]}
    pytest.importorskip("matplotlib")
    draw(found, "title", tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 0
