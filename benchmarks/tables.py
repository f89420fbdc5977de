"""Writes the tables of the documentation anew from result files.

python -m benchmarks.tables

<!-- table: bench_block block_8b_2xh200 -->       the script that wrote the results, and their names
...                                               replaced by the script's table of them
<!-- end of table -->
<!-- table: record_8gpus.speed_table NAME -->      another table of the script
"""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path

from benchmarks.record import RESULTS, ROOT, read

MARKED = re.compile(
    r"(<!-- table: (?P<script>\w+)(?:\.(?P<table>\w+))? (?P<names>[^>]+?) -->\n)"
    r".*?(?P<end><!-- end of table -->)",
    re.S,
)


def rewritten(text: str, results: Path = RESULTS) -> str:
    """``text`` with each marked table made from its results. Raises FileNotFoundError for a result
    that is not there."""

    def table(match: re.Match[str]) -> str:
        records = [read(results / f"{name}.json") for name in match["names"].split()]
        module = importlib.import_module(f"benchmarks.{match['script']}")
        made = getattr(module, match["table"] or "table")(records)
        return f"{match[1]}\n{made}\n{match['end']}"

    return MARKED.sub(table, text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    documents = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *ROOT.glob("docs/*.md")]
    parser.add_argument("documents", type=Path, nargs="*", default=documents)
    for document in parser.parse_args().documents:
        before = document.read_text(encoding="utf-8")
        after = rewritten(before)
        if after != before:
            document.write_text(after, encoding="utf-8")
            print(f"{document.name}: tables written")


if __name__ == "__main__":
    main()
