"""Tables that the planner makes for docs/."""

from __future__ import annotations

import pytest

from benchmarks import plan_memory
from benchmarks.plan_published import PAGE, PEAKS, Planned, peak_table, with_table


def test_a_table_replaces_the_one_between_its_markers() -> None:
    text = "a\n<!-- planned: x -->\nold\n<!-- end of planned: x -->\nb\n"
    new = "a\n<!-- planned: x -->\n\n| t |\n\n<!-- end of planned: x -->\nb\n"
    assert with_table(text, "x", "| t |\n") == new
    assert with_table(new, "x", "| t |\n") == new
    with pytest.raises(ValueError, match="no markers of 'y'"):
        with_table(text, "y", "")


def test_the_planned_tables_of_the_memory_page_are_current() -> None:
    text = plan_memory.PAGE.read_text(encoding="utf-8")
    assert plan_memory.page(text) == text, "run python -m benchmarks.plan_memory"


def test_the_peaks_beside_published_ones_are_current() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = peak_table(PEAKS)
    assert with_table(text, "peaks", table) == text, "run python -m benchmarks.plan_published"


def test_the_plan_that_works_as_theirs_keeps_block_inputs_alone() -> None:
    plan = Planned("8B", 8).as_theirs(2**20)
    assert {layer.mode for layer in plan.job.layers} == {"full"}
    assert sum(layer.input_on_host for layer in plan.job.layers) == 31
