"""The headline figures, picked from result files into results/summary.json; never written by hand.

    python -m benchmarks.summary

Each key has value, source file, commit, date and device. Of several files that could give a figure the
latest does. A figure that no file gives is absent. Runs on CPUs and runs that failed give none.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.bench_plan import figure, gib
from benchmarks.record import RESULTS, Record, read

K, M = 1 << 10, 1 << 20
GPU_GIB = 79.0  # what a GPU of 80 GB leaves for a job
FLAVOR = "8B"

Rule = Callable[[Record], float | None]


def _cases(record: Record, script: str, **wanted: Any) -> Iterator[Record]:
    """Cases of a record of ``script`` that did not fail and have the wanted values."""
    if record.get("script") != script or record.get("flavor", FLAVOR) != FLAVOR:
        return
    for case in record["cases"]:
        if "error" not in case and all(case.get(k) == value for k, value in wanted.items()):
            yield case


def peak(strategy: str, mode: str, seq_len: int) -> Rule:
    """Peak of activations in B, blocks as rank 0 of 8, offloaded, the normed input not held."""

    def rule(record: Record) -> float | None:
        if record.get("ranks") != 8 or record.get("hold_normed_input"):
            return None
        wanted = {"strategy": strategy, "mode": mode, "seq_len": seq_len, "offload": True}
        found = [c["peak_b"] for c in _cases(record, "bench_block", **wanted, kind="ours")]
        return min(found, default=None)

    return rule


def fastest(record: Record, seq_len: int) -> Record | None:
    """This project's fastest case of blocks over two real ranks, offloaded as long rows need it."""
    if record.get("peers") != "real ranks" or record.get("ranks") != 2:
        return None
    cases = _cases(record, "bench_block", kind="ours", seq_len=seq_len, offload=True)
    return min(cases, key=lambda case: case["seconds"]["median"], default=None)


def block_ratio(seq_len: int) -> Rule:
    """Time of the published schedule with cudnn over that of our fastest case, of the same run."""

    def rule(record: Record) -> float | None:
        case = fastest(record, seq_len)
        ratio = case and case.get("time_of_others", {}).get("published, cudnn")
        return ratio["median"] if ratio else None

    return rule


def ceiling_fraction(seq_len: int) -> Rule:
    def rule(record: Record) -> float | None:
        case = fastest(record, seq_len)
        if case is None or "time_of_others" not in case:  # the one that the ratio is of
            return None
        return case["ceiling_fraction"]["median"] if "ceiling_fraction" in case else None

    return rule


def offload_ratio(seq_len: int) -> Rule:
    """Step with offload over the same step without it: the same case but for that, of one run."""

    def rule(record: Record) -> float | None:
        if record.get("peers") != "real ranks":
            return None
        same = ("strategy", "mode", "kernel", "compile")
        times: dict[tuple[Any, ...], dict[bool, float]] = {}
        for case in _cases(record, "bench_block", kind="ours", seq_len=seq_len):
            pair = times.setdefault(tuple(case[k] for k in same), {})
            pair[case["offload"]] = case["seconds"]["median"]
        ratios = [pair[True] / pair[False] for pair in times.values() if len(pair) == 2]
        return max(ratios, default=None)

    return rule


def _rank8(record: Record, **wanted: Any) -> Iterator[Record]:
    """Of Llama 3 8B, with all products in bf16."""
    job = record.get("config", "")
    is_8b = 'name = "llama3"' in job and 'flavor = "8B' in job
    in_float8 = any(flag.startswith("--float8.enable") for flag in record.get("flags", []))
    if record.get("ranks") == 8 and is_8b and not in_float8:
        yield from _cases(record, "bench_rank8", **wanted)


def tokens_per_second(seq_len: int) -> Rule:
    """Of a rank of 8, all layers (or extrapolated to all), its peers' traffic left out."""

    def rule(record: Record) -> float | None:
        cases = list(_rank8(record, seq_len=seq_len))
        whole = [c for c in cases if c["layers"] is None or "extrapolated_from" in c]
        return whole[-1]["tps"]["median"] if whole else None

    return rule


def _dry_runs(record: Record) -> Iterator[tuple[Record, float]]:
    """Steps of the whole model as rank 0 of 8, and the GiB that they reserved."""
    for case in _cases(record, "bench_plan", world=8, model="llama3 8B"):
        size = gib(case, "peak reserved")
        if size is not None:
            yield case, size


def reserved(seq_len: int) -> Rule:
    """With weights, gradients and Adam's moments on the GPU."""

    def rule(record: Record) -> float | None:
        found = [
            size
            for case, size in _dry_runs(record)
            if case["seq_len"] == seq_len and figure(case, "Adam moments")
        ]
        return min(found, default=None)

    return rule


def longest(record: Record) -> float | None:
    """The longest row, in Mi tokens, of which a rank of 8 reserved no more than an 80 GB GPU has, less what
    NCCL and the driver take. Of the GPU alone: the host that it needs stands in the record."""
    fits = [
        case["seq_len"] / M
        for case, size in _dry_runs(record)
        if case["fits"] and size <= min(GPU_GIB, case["limit"] / 2**30)
    ]
    return max(fits, default=None)


def unhidden(seq_len: int) -> Rule:
    def rule(record: Record) -> float | None:
        if record.get("script") != "trace_share" or record["seq_len"] != seq_len:
            return None
        return float(record["shares"]["unhidden"])

    return rule


RULES: dict[str, Rule] = {
    "memory.upipe_selective_1Mi_peak_B": peak("upipe:1", "selective", M),
    "memory.upipe_selective_5Mi_peak_B": peak("upipe:1", "selective", 5 * M),
    "memory.upipe_full_5Mi_peak_B": peak("upipe:1", "full", 5 * M),
    "memory.ulysses_selective_5Mi_peak_B": peak("ulysses", "selective", 5 * M),
    "memory.rank8_8b_5Mi_reserved_gib": reserved(5 * M),
    "memory.rank8_8b_8Mi_reserved_gib": reserved(8 * M),
    "memory.rank8_8b_10Mi_reserved_gib": reserved(10 * M),
    "memory.longest_8b_8x80gb_Mi": longest,
    "memory.offload_step_ratio_256k": offload_ratio(256 * K),
    "speed.block_128k_ratio": block_ratio(128 * K),
    "speed.block_256k_ratio": block_ratio(256 * K),
    "speed.block_512k_ratio": block_ratio(512 * K),
    "speed.block_256k_ceiling_fraction": ceiling_fraction(256 * K),
    "speed.rank8_8b_128k_tps": tokens_per_second(128 * K),
    "speed.rank8_8b_256k_tps": tokens_per_second(256 * K),
    "speed.rank8_8b_512k_tps": tokens_per_second(512 * K),
    "speed.rank8_8b_1M_tps": tokens_per_second(M),
    "speed.unhidden_share_128k": unhidden(128 * K),
}

BEST_OF_ALL = ("memory.longest_8b_8x80gb_Mi",)
"""Figures of which the largest counts, not the latest."""


def summarise(folder: Path) -> dict[str, Record]:
    records = []
    for path in sorted(folder.glob("*.json")):
        record = read(path) if path.name != "summary.json" else {}
        if "script" in record and not record["device"].startswith("CPU"):
            records.append((record, path))
    records.sort(key=lambda item: (item[0]["date"], item[0]["time"]))
    summary = {}
    for key, rule in RULES.items():
        found = [
            (value, record, path) for record, path in records if (value := rule(record)) is not None
        ]
        if not found:
            continue
        best = max(found, key=lambda item: item[0]) if key in BEST_OF_ALL else found[-1]
        value, record, path = best
        facts = {name: record[name] for name in ("commit", "date", "device")}
        summary[key] = {"value": round(value, 4), "source": path.name, **facts}
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    folder = parser.parse_args().results
    summary = summarise(folder)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    for key in RULES:
        line = summary.get(key)
        print(f"{key:40} " + (f"{line['value']:<10} {line['source']}" if line else "no result yet"))


if __name__ == "__main__":
    main()
