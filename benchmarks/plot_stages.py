"""Time and memory of a block by heads per stage, from one result of bench_block.py.

    python -m benchmarks.plot_stages --name block_8b_2xh200_stages

Draws NAME_stages.png: for each length the cases upipe:1, upipe:2, ... (and ulysses, which is all heads at
once), time relative to the fastest of them against the peak of activations.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

from benchmarks.record import RESULTS, Record, read, tokens

Point = tuple[float, float, str]


def points(record: Record) -> dict[int, list[Point]]:
    """Length -> (peak in B, time over the least, heads per stage) of this project's cases, which should
    differ in nothing else: where several share a strategy, the fastest."""
    fastest: dict[int, dict[str, Record]] = defaultdict(dict)
    for case in record["cases"]:
        name = case["strategy"].partition(":")[0]
        if "error" in case or case["kind"] != "ours" or name not in ("upipe", "ulysses"):
            continue
        others = fastest[case["seq_len"]]
        known = others.get(case["strategy"])
        if known is None or case["seconds"]["median"] < known["seconds"]["median"]:
            others[case["strategy"]] = case
    found = {}
    for seq_len, cases in fastest.items():
        least = min(case["seconds"]["median"] for case in cases.values())
        found[seq_len] = [
            (
                case["peak_b"],
                case["seconds"]["median"] / least,
                "all" if strategy == "ulysses" else strategy.partition(":")[2] or "1",
            )
            for strategy, case in cases.items()
        ]
    return found


def draw(found: dict[int, list[Point]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 5))
    for seq_len, line in found.items():
        line = sorted(line)
        axis.plot(
            [p[0] for p in line], [p[1] for p in line], "o-", label=f"{tokens(seq_len)} tokens"
        )
        for peak, time, heads in line:
            axis.annotate(heads, (peak, time), textcoords="offset points", xytext=(5, 5))
    axis.set(title=title, xlabel="peak of activations, B", ylabel="time over the least")
    axis.legend(title="heads per stage beside the points")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", required=True)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    record = read(args.results / f"{args.name}.json")
    title = f"{record['flavor']} block, {record['ranks']} ranks, {record['device']}"
    draw(points(record), title, args.results / f"{args.name}_stages.png")


if __name__ == "__main__":
    main()
