"""Tables in documents are made from result files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.record import ROOT
from benchmarks.tables import rewritten

DOCUMENTS = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_those_of_the_results(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert rewritten(text) == text, "run python -m benchmarks.tables"


def test_a_marked_table_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    spread = {"median": 2.0, "min": 1.0, "max": 3.0}
    record = {"name": "e", "ranks": 2, "device": "GPU", "host_copies": {"device_to_host": spread}}
    record["all_to_all"] = [{"mib": 64, "gbps": spread}]
    (tmp_path / "e.json").write_text(json.dumps(record))
    text = "before\n<!-- table: exchange e -->\n\n| old |\n\n<!-- end of table -->\nafter\n"
    made = rewritten(text, tmp_path)
    assert made.startswith("before\n<!-- table: exchange e -->\n\n| device |")
    assert "64 MiB per rank | 2 (1 to 3) |" in made and "old" not in made
    assert made.endswith("<!-- end of table -->\nafter\n")
    assert rewritten(made, tmp_path) == made


def test_a_table_of_no_result_is_refused(tmp_path: Path) -> None:
    text = "<!-- table: exchange gone -->\n<!-- end of table -->"
    with pytest.raises(FileNotFoundError):
        rewritten(text, tmp_path)
