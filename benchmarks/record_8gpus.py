"""The record steps on all GPUs of one host: whole jobs, long rows, the exchange, and equal losses.

    python -m benchmarks.record_8gpus --name record_8xh200 --ranks 8

One visit to a machine: parts run one after another, the most valuable first, each a launch of its own with
its own time limit, until --budget seconds are spent. After each part NAME.json and NAME.md are written, the
reason with them where it failed, so nothing is lost when the visit is cut short. The next visit reads
--out/NAME.json, or else benchmarks/results/NAME.json, and runs what has no good result yet; a part whose
settings have changed runs again. With --budget 0 nothing runs and every part is planned anew.

Parts, of Llama 3 8B in bf16 with AdamW, FSDP2 and context parallel over all ranks, rows of one document:

    lean_128K ...       all layers: upipe, selective checkpointing, offload, fa4, compiled
    published_128K ...  all layers: upipe, full checkpointing, offload, cudnn
    ulysses_128K ...    all layers: the same with ulysses
    long_upipe_3M ...   cut to --cut_layers layers, one step, Adam's moments on the host: memory by the plan
    long_ulysses_3M     the same with ulysses, whose loss must be equal
    equal_*_256K        cut, three steps: ulysses over all ranks, usp and upipe around a ring of 2
    exchange            exchange.py

What each part should hold and take is planned for --hardware first (planner.py); the seconds decide whether
a part still fits into the visit. Arguments that it does not know go to every job.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import bench_train, limited
from benchmarks.record import (
    RESULTS,
    ROOT,
    Record,
    commit,
    environment,
    parser_beside_a_job,
    read,
    tokens,
    why,
    write,
)
from benchmarks.record_tables import (
    exchange_table,
    long_table,
    loss_table,
    plan_table,
    speed_table,
    table,
)
from torchtitan_lc.config.manager import load_config
from torchtitan_lc.config.token_count import parse_token_count
from torchtitan_lc.plan.hardware import GIB, TABLE, make_cluster
from torchtitan_lc.plan.job import planned_model
from torchtitan_lc.plan.planner import make_plan

__all__ = ["exchange_table", "long_table", "loss_table", "plan_table", "speed_table", "table"]

STARTUP = 40.0  # seconds from a launch to its first step, and what that one takes longer
EXCHANGE = 45.0  # seconds of exchange.py
UNPLANNED = 180.0  # seconds of a part whose plan failed
MARGIN, MORE = (
    2.0,
    60.0,
)  # a part may take so many times as long as it should, and so many seconds more


@dataclass(frozen=True)
class Part:
    """steps: of the job; 0: no job but exchange.py, with ``flags``."""

    name: str
    flags: tuple[str, ...]
    steps: int


def parts(args: argparse.Namespace, extra: Sequence[str]) -> list[Part]:
    """In the order in which they are tried. A later flag of a job wins."""
    common = (
        f"--parallelism.context_parallel_degree={args.ranks}",
        "--training.no_isolate_documents",
        "--attention.no_self_check",
        "--activation_offload.enable",
        "--metrics.no_enable_tensorboard",
        # The first steps of a long schedule: losses that change little are compared.
        "--lr_scheduler.total_steps=1000",
        # A rank may wait for one layer's kernels; the part's own limit ends what hangs.
        "--comm.init_timeout_seconds=1800",
    )
    whole = (*common, "--model.name=llama3", f"--model.flavor={args.flavor}")
    cut = (*common, "--model.name=llama3_cut", f"--model.flavor={args.flavor}-{args.cut_layers}")
    upipe, ulysses = "--attention.strategy=upipe", "--attention.strategy=ulysses"
    selective = ("--activation_checkpoint.mode=selective", f"--attention.kernel={args.kernel}")
    full = ("--activation_checkpoint.mode=full", f"--attention.kernel={args.published_kernel}")
    schedules = {
        "lean": (upipe, *selective, "--compile.enable"),
        "published": (upipe, *full, "--attention.overlap_exchange=false"),
        "ulysses": (ulysses, *full),
    }
    long = (*selective, "--optimizer.offload_state", "--tiling.mlp_tokens=4096")
    half = f"--parallelism.context_parallel_ulysses_degree={args.ranks // 2}"
    equal = {"ulysses": (ulysses,), "usp": (ulysses, half), "upipe_ring": (upipe, half)}

    def part(name: str, seq_len: int, steps: int, *flags: str) -> Part:
        flags = (*flags, f"--training.seq_len={tokens(seq_len)}", *extra)
        return Part(f"{name}_{tokens(seq_len)}", flags, steps)

    def jobs(name: str, lengths: Sequence[int]) -> list[Part]:
        """Three steps of the shortest length, two of the others: the first one is not counted."""
        return [
            part(name, n, 3 if n == args.lengths[0] else 2, *whole, *schedules[name])
            for n in lengths
        ]

    def longs(name: str, strategy: str, lengths: Sequence[int]) -> list[Part]:
        return [part(f"long_{name}", n, 1, *cut, strategy, *long) for n in lengths]

    shorter, longest = args.lengths[:-1], args.lengths[-1:]
    mib = ("--mib", *map(str, args.mib), "--copy_mib", str(max(args.mib) // 2))
    return [
        *jobs("lean", args.lengths),
        Part("exchange", mib, 0),
        *(
            part(f"equal_{name}", args.equal_length, 3, *cut, *flags, *selective)
            for name, flags in equal.items()
        ),
        *longs("upipe", upipe, args.cut_lengths[:2]),
        *jobs("published", shorter),
        *longs("ulysses", ulysses, args.cut_lengths[:1]),
        *jobs("ulysses", shorter),
        *jobs("published", longest),
        *jobs("ulysses", longest),
        *longs("ulysses", ulysses, args.cut_lengths[1:2]),
        *longs("upipe", upipe, args.cut_lengths[2:]),
    ]


def planned(part: Part, args: argparse.Namespace) -> Record:
    """What the planner says of a job, in GiB of a GPU and of the host, and seconds of a step."""
    flags = bench_train.job_flags(args.config, part.steps, part.flags)
    flags += [f"--plan.hardware={args.hardware}", f"--plan.gpus_per_node={args.ranks}"]
    found: Record = {"commit": commit(), "hardware": args.hardware}
    try:
        config = load_config([*flags, "--plan.nodes=1"], quiet=True)
        plan = make_plan(config, planned_model(config), make_cluster(config.plan))
    except Exception as error:  # a plan that fails is said, and keeps no job from running
        return {**found, "error": why(error)}
    return {
        **found,
        "allocated_gib": plan.peak.total / GIB,
        "gpu_gib": plan.gpu_bytes / GIB,
        "host_gib": plan.host.total / GIB,
        "seconds": plan.time.seconds,
        "tps": plan.tokens_per_second,
    }


def estimate(part: Part, plan: Record) -> float:
    """Seconds of the whole part."""
    if part.steps == 0:
        return EXCHANGE
    return STARTUP + part.steps * plan["seconds"] if "seconds" in plan else UNPLANNED


def is_good(part: Part, entry: Record) -> bool:
    """Whether an earlier visit has this part's result, under the same settings."""
    return is_of(part, entry) and "failed" not in entry


def is_of(part: Part, entry: Record) -> bool:
    return entry.get("flags") == list(part.flags) and entry.get("steps_wanted") == part.steps


def measure(part: Part, args: argparse.Namespace, limit: float) -> Record:
    """Runs one part; its figures, and "failed" with the reason where there is one."""
    facts = environment("record_8gpus")
    if part.steps == 0:
        return {**facts, **_exchange(part, args, limit)}
    result = bench_train.run(args.config, part.steps, part.flags, ngpu=args.ranks, limit=limit)
    losses = [line["loss"] for line in result.get("steps", [])]
    if "failed" not in result and not (
        len(losses) == part.steps and all(x is not None and math.isfinite(x) for x in losses)
    ):
        result["failed"] = f"losses are {losses} after {part.steps} steps"
    return {**facts, **result}


def _exchange(part: Part, args: argparse.Namespace, limit: float) -> Record:
    meeting = ("--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--local_addr")
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", str(args.ranks), *meeting)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *launcher, "localhost", "-m", "benchmarks.exchange"]
        command += ["--name", "exchange", "--out", folder, *part.flags]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        ended = limited.run(command, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, limit)
        result: Record = {"seconds": round(ended.seconds, 1), "exit_code": ended.exit_code}
        if ended.exit_code == 0:
            found = read(Path(folder) / "exchange.json")
            return result | {key: found[key] for key in ("ranks", "all_to_all", "host_copies")}
        lines = ended.output.replace(f"{ROOT}/", "").splitlines()
        why_not = "ended after its limit" if ended.ended_early else f"exit code {ended.exit_code}"
        return {**result, "failed": why_not, "log": lines[-60:]}


def earlier(args: argparse.Namespace) -> Record:
    """What visits before this one have left, or an empty record."""
    for folder in (args.out, RESULTS):
        if (folder / f"{args.name}.json").exists():
            return read(folder / f"{args.name}.json")
    return {"visits": [], "parts": {}}


def visit(args: argparse.Namespace, extra: Sequence[str]) -> Record:
    ends = time.monotonic() + args.budget
    record, todo = earlier(args), parts(args, extra)
    unknown = {*(args.parts or ())} - {part.name for part in todo}
    if unknown:
        raise SystemExit(f"--parts {' '.join(sorted(unknown))}: no such part")
    found: dict[str, Record] = record["parts"]
    facts = environment("record_8gpus")
    visits = record["visits"]
    if args.budget:
        visits = [*visits, {key: facts[key] for key in ("commit", "date", "time", "device")}]
    keys = ("ranks", "flavor", "cut_layers", "kernel", "published_kernel", "hardware")
    record |= {key: getattr(args, key) for key in keys} | {"visits": visits}
    if (
        args.budget or not visits
    ):  # planning again, elsewhere, changes nothing about what was measured
        record |= facts

    def keep(part: Part, entry: Record) -> None:
        known = {"flags": list(part.flags), "steps_wanted": part.steps}
        found[part.name] = {**known, "plan": plans[part.name], **entry}
        write(args.name, record, args.out, table([record]))

    plans: dict[str, Record] = {}
    for part in todo:
        entry = found.get(part.name, {})
        plan = entry.get("plan", {}) if is_of(part, entry) else {}
        is_planned = "seconds" in plan and plan["hardware"] == args.hardware
        if part.steps and not (is_planned and args.budget):
            plan = planned(part, args)
        plans[part.name] = plan
        if is_of(part, entry):
            keep(part, {key: value for key, value in entry.items() if key != "plan"})
        elif not entry:  # what was measured under other settings stays until it is measured again
            keep(part, {"failed": "not tried yet"})
    for part in todo:
        if is_good(part, found[part.name]) or (args.parts and part.name not in args.parts):
            continue
        left = ends - time.monotonic()
        wanted = estimate(part, plans[part.name])
        if left < wanted:
            continue  # a shorter one may still fit
        limit = min(left, MARGIN * wanted + MORE)
        keep(part, {"failed": "the visit was cut short while it ran"})
        entry = measure(part, args, limit)
        keep(part, entry)
        said = {key: entry.get(key) for key in ("seconds", "failed", "tps", "memory")}
        print(json.dumps({"part": part.name, **said}), flush=True)
    return record


def parser() -> argparse.ArgumentParser:
    made = parser_beside_a_job(__doc__)
    add = made.add_argument
    add("--name", required=True)
    add("--ranks", type=int, default=8)
    add("--config", default="llama8b_1m.toml", help="what no flag of a part says")
    add("--flavor", default="8B", help="of llama3")
    add("--lengths", type=parse_token_count, nargs="+", default=[2**17, 2**18, 2**19])
    add("--cut_lengths", type=parse_token_count, nargs="+", default=[3 << 20, 5 << 20])
    add("--cut_layers", type=int, default=2)
    add("--equal_length", type=parse_token_count, default=2**18)
    add("--kernel", default="fa4", help="of lean, long and equal parts")
    add("--published_kernel", default="cudnn", help="of published and ulysses parts")
    add("--mib", type=int, nargs="+", default=[64, 256, 1024, 2048], help="buffers of exchange")
    add("--hardware", default="h200_141gb", choices=TABLE, help="planned for")
    add("--parts", nargs="+", help="run these alone, by name")
    add("--budget", type=float, default=540.0, help="seconds of this visit; 0: plan only")
    add("--out", type=Path, default=RESULTS)
    return made


def main() -> None:
    args, extra = parser().parse_known_args()
    print(table([visit(args, extra)]))


if __name__ == "__main__":
    main()
