"""What is a layer's and what a step's own, from the steps of two models."""

from __future__ import annotations

import pytest

from benchmarks.host_time import per_layer, plan_table, table


def test_layers_are_the_difference_of_two_models_by_their_least_disturbed_steps() -> None:
    few = {"forward": [0.3, 0.2], "backward": [0.5, 0.9], "step": [1.0, 1.4]}
    many = {"forward": [0.6, 0.8], "backward": [1.7, 1.3], "step": [2.8, 2.2]}
    found = per_layer(few, many, [2, 6])
    assert found == {
        "forward": pytest.approx((0.6 - 0.2) / 4),
        "backward": pytest.approx((1.3 - 0.5) / 4),
        "rest": pytest.approx(1.0 - 2 * (2.2 - 1.0) / 4),
    }


def test_tables_show_milliseconds_and_a_case_that_failed_by_its_reason() -> None:
    flags = ["--config=debug.toml", "--parallelism.context_parallel_degree=2"]
    seconds = {"forward": 0.5, "backward": 1.5, "rest": 0.001}
    case = {"case": "plain", "flags": [], "seconds": seconds}
    record = {"ranks": 2, "seq_len": 1024, "flags": flags, "cases": [case]}
    failed = {"case": "broken", "flags": [], "error": "UserError: no"}
    shown = table([{**record, "cases": [case, failed]}])
    assert "| plain | 500.0 | 1500.0 | 1.0 |" in shown and "| broken | UserError: no |" in shown
    planned = plan_table([record])
    assert "| plain | 500.0 | 1500.0 | 2000.0 |" in planned and "-9" in planned
