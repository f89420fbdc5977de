"""Dry runs beside their plans: jobs one after another, each as rank 0 of its cluster, measured against planned.

    python -m benchmarks.bench_plan --name plan_8b_h200 --dry_run.kernel=stand_in --plan.hardware=h100_80gb \
        --case 8M "llama8b_5m.toml --training.seq_len=8M" --case 10M llama8b_10m.toml

A case is a name and, in one word, a config file and flags of its own; arguments that this script does not know
go to all. Each is a `--dry_run` (docs/dry-run.md), with the memory limit of its hardware: bytes are the
allocator's, without NCCL's and the driver's, and host bytes what the job would need even where layers
shared their buffers. Seconds are in the record; where the GPU is another than the planned one, or the kernel
a stand-in, they say nothing of the plan.
The record is written after every case.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import (
    RESULTS,
    Record,
    environment,
    markdown,
    number,
    parser_beside_a_job,
    tokens,
    why,
    write,
)
from benchmarks.timing import GIB, release
from torchtitan_lc.config.manager import load_config
from torchtitan_lc.dry_run.compare import Comparison
from torchtitan_lc.dry_run.job import make_dry_job
from torchtitan_lc.dry_run.measure import measure
from torchtitan_lc.tools.hardware import device_type


def run_case(words: Sequence[str]) -> Record:
    """The comparison of one job; "error" where it could not be run, or ran out of memory."""
    try:
        config = load_config(["--config", *words], quiet=True)
        job = make_dry_job(config, device_type())
        comparison = Comparison(job, measure(job))
    except Exception as error:  # a job that is refused is a result, too
        return {"error": why(error)}
    found = comparison.record()
    if found["error"] is None:
        del found["error"]
    plan, resolved = comparison.job.plan, comparison.job.config
    return {
        **found,
        "strategy": resolved.attention.strategy,
        "heads_per_stage": resolved.attention.heads_per_stage,
        "layers": dict(Counter(layer.mode for layer in plan.job.layers)),
        "block_inputs_every": resolved.activation_checkpoint.block_inputs_every,
    }


def figure(case: Record, name: str, which: str = "measured") -> float | None:
    value: float | None = case.get("figures", {}).get(name, {}).get(which)
    return value


def gib(case: Record, name: str, which: str = "measured") -> float | None:
    value = figure(case, name, which)
    return None if value is None else value / GIB


def host_gib(case: Record) -> float:
    """Of one rank, measured: page-locked activations, and state that lies on the host."""
    names = [name for name in case["figures"] if name.startswith("host: ")]
    return sum(gib(case, name) or 0.0 for name in names)


def table(results: Sequence[Record]) -> str:
    headers = ["case", "length", "allocated, GiB", "planned", "off by", "reserved", "of allocated"]
    return markdown([*headers, "host of a rank", "planned", "fits"], list(_rows(results)))


def peaks_table(results: Sequence[Record]) -> str:
    """Without what the allocator held beside tensors."""
    headers = ["case", "length", "allocated, GiB", "planned", "off by"]
    return markdown(headers, [row[: len(headers)] for row in _rows(results)])


def _rows(results: Sequence[Record]) -> Iterator[list[str]]:
    for case in (case for result in results for case in result["cases"]):
        row = [case["case"], tokens(case["seq_len"]) if "seq_len" in case else ""]
        if "error" in case:
            where = f" in {case['at']}" if "at" in case else ""
            yield [*row, f"{case['error']}{where}", *[""] * 7]
            continue
        allocated, reserved = gib(case, "peak allocated"), gib(case, "peak reserved")
        off = case["figures"]["peak allocated"]["plan_off_by_percent"]
        row += [number(allocated), number(gib(case, "peak allocated", "planned")), f"{off:+.1f} %"]
        row += [number(reserved), number(reserved / allocated, 3) if reserved and allocated else ""]
        planned = [gib(case, name, "planned") for name in case["figures"] if "host: " in name]
        row += [number(host_gib(case), 1), number(sum(filter(None, planned)), 1)]
        yield [*row, "yes" if case["fits"] else "no"]


def main() -> None:
    parser = parser_beside_a_job(__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--case", nargs=2, action="append", required=True, metavar=("NAME", "JOB"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args, flags = parser.parse_known_args()
    cases: list[dict[str, Any]] = []
    for name, words in args.case:
        release(torch.device(device_type()))
        case = {"case": name, "flags": [*shlex.split(words), *flags]}
        cases.append(case | run_case([*case["flags"]]))
        print(json.dumps(cases[-1]), flush=True)
        result = {**environment("bench_plan"), "cases": cases}
        write(args.name, result, args.out, table([result]))
    print(table([result]))


if __name__ == "__main__":
    main()
