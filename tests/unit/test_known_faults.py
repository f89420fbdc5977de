"""The table of known faults names tests that exist, and gives a reason where it names none."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def _entries() -> dict[str, str]:
    """Number of the fault -> the cell that names its tests."""
    lines = (TESTS / "KNOWN_FAULTS.md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| BR")]
    assert all(len(row) == 5 for row in rows), "five columns"
    assert len({row[0] for row in rows}) == len(rows), "a number stands twice"
    return {row[0]: row[4] for row in rows}


def _functions(path: Path) -> set[str]:
    return {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}


def test_every_test_that_the_table_names_exists() -> None:
    entries = _entries()
    assert len(entries) == 81
    named = {test for cell in entries.values() for test in re.findall(r"`([^`]+::[^`]+)`", cell)}
    assert len(named) > 40
    known: dict[str, set[str]] = {}
    for test in sorted(named):
        file, function = test.split("::")
        if file not in known:
            known[file] = _functions(TESTS / file)
        assert function.startswith("test_") and function in known[file], test


def test_what_is_not_tested_has_a_reason() -> None:
    for number, cell in _entries().items():
        for part in cell.split("<br>"):
            assert re.fullmatch(r"`[^`]+::[^`]+`|(not yet|later): \w.*", part), (number, part)
