"""What the host needs to start a step's work: Python, PyTorch's dispatch, launches.

    python -m benchmarks.host_time --name host_8b_h200 --config llama8b_1m.toml --ranks 2 --layers 2 6 \
        --seq_len 2K --case "1 head: --attention.heads_per_stage=1" [--section.key value ...]

The GPU works beside the host. Where a step has many stages of few tokens each, it waits, and the host sets the
pace. Here rows are so short that the GPU always waits: what is measured is the host alone. One process runs the
real trainer as rank 0 of --ranks on torch's fake process group, as in bench_rank8.py. A case is a name, a colon
and the flags of its own; arguments that are not known here go to all.

Per case, of one layer (the difference of the two models of --layers): seconds of forward and of backward, and
of the rest of a step; from the least of --repeats, as whatever else the machine does only adds. Per process
group that can be had with one process, nccl and fake: microseconds to start an all-to-all on its own stream and
wait for it on the current one. A step's exchanges are in its seconds as the fake group's.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bench_rank8 import job
from benchmarks.record import (
    RESULTS,
    Record,
    environment,
    markdown,
    number,
    parser_beside_a_job,
    spread,
    why,
    write,
)
from benchmarks.shapes import join
from benchmarks.timing import now, release
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.manager import load_config
from torchtitan_lc.config.token_count import parse_token_count
from torchtitan_lc.plan.hardware import TABLE, Cluster
from torchtitan_lc.plan.job import planned_model
from torchtitan_lc.plan.planner import make_plan
from torchtitan_lc.tools.hardware import device_type
from torchtitan_lc.trainer import Trainer

_CALLS = 200  # fewer than a GPU's queue holds, so that the host never waits for room in it


def exchange_us(device: torch.device, repeats: int) -> Record:
    """Of one exchange of the group that is up, as comm.py starts it and waits for it."""
    sent = torch.zeros(1024 * dist.get_world_size(), device=device)
    received = torch.empty_like(sent)
    times = []
    for _ in range(repeats + 1):
        began = now(device)
        for _ in range(_CALLS):
            dist.all_to_all_single(received, sent, async_op=True).wait()
        times.append((time.perf_counter() - began) / _CALLS * 1e6)
    return spread(times[1:])


def real_exchange_us(device: torch.device, repeats: int) -> Record:
    """Of NCCL with this process alone."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        return exchange_us(device, repeats)
    finally:
        dist.destroy_process_group()


def step_seconds(config: JobConfig, device: torch.device, warmup: int, repeats: int) -> Record:
    """Lists of seconds by part: forward and backward until everything is started, and the whole step."""
    trainer = Trainer(config, device)
    marks: dict[str, float] = {}

    def mark(name: str) -> Any:
        return lambda *_: marks.update({name: time.perf_counter()})

    trainer.module.register_forward_pre_hook(mark("begin"))
    trainer.module.register_forward_hook(mark("middle"))
    trainer.optimizer.register_step_pre_hook(mark("end"))
    found: dict[str, list[float]] = {"forward": [], "backward": [], "step": []}
    gc.collect()
    gc.disable()  # as Trainer.train does; close() undoes it
    try:
        with trainer.metrics(0) as metrics:
            for step in range(warmup + repeats):
                began = now(device)
                trainer.train_step(metrics)
                if step >= warmup:
                    found["step"].append(now(device) - began)
                    found["forward"].append(marks["middle"] - marks["begin"])
                    found["backward"].append(marks["end"] - marks["middle"])
    finally:
        trainer.close()
    return found


def per_layer(few: Record, many: Record, layers: Sequence[int]) -> Record:
    """From the lists of two models: of a layer forward and backward, and of a step without its layers."""
    more = layers[1] - layers[0]
    found = {part: (min(many[part]) - min(few[part])) / more for part in few}
    rest = min(few["step"]) - layers[0] * found["step"]
    return {"forward": found["forward"], "backward": found["backward"], "rest": rest}


def run_case(args: argparse.Namespace, flags: list[str], device: torch.device) -> Record:
    times: list[Record] = []
    for layers in args.layers:
        release(device)
        with tempfile.TemporaryDirectory() as folder:
            words = [*flags, f"--job.dump_folder={folder}"]
            config = job(words, args.seq_len, layers, args.ranks)
            times.append(step_seconds(config, device, args.warmup, args.repeats))
    return {"seconds": per_layer(times[0], times[1], args.layers), "times": times}


def table(results: Sequence[Record]) -> str:
    rows = []
    for case in (case for result in results for case in result["cases"]):
        if "error" in case:
            rows.append([case["case"], case["error"], "", ""])
            continue
        parts = ("forward", "backward", "rest")
        rows.append([case["case"], *(number(1e3 * case["seconds"][part], 1) for part in parts)])
    return markdown(["case", "forward of a layer, ms", "backward, ms", "rest of a step, ms"], rows)


def plan_table(results: Sequence[Record]) -> str:
    """Of a layer: forward, backward, and both beside a plan."""
    rows = []
    for result in results:
        for case in result["cases"]:
            forward, backward = (case["seconds"][part] for part in ("forward", "backward"))
            planned, both = planned_layer(result, case), forward + backward
            row = [number(1e3 * x, 1) for x in (forward, backward, both, planned)]
            rows.append([case["case"], *row, f"{100 * (planned / both - 1):+.0f} %"])
    return markdown(["case", "forward, ms", "backward", "both", "planned", "off by"], rows)


def planned_layer(result: Record, case: Record) -> float:
    """Seconds of a layer by the plan for an H200: the host's or the GPU's, whichever is longer."""
    flags = [*result["flags"], *case["flags"], f"--training.seq_len={result['seq_len']}"]
    config = load_config(flags, quiet=True)
    ranks = Cluster(TABLE["h200_141gb"], 1, result["ranks"])
    plan = make_plan(config, planned_model(config), ranks)
    outside = ("loss", "FSDP", "optimizer")
    parts = plan.time.parts
    seconds = sum(parts[name] for name in parts if not name.startswith(outside))
    return seconds / len(plan.job.layers)


def main() -> None:
    parser = parser_beside_a_job(__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--case", action="append", required=True, metavar="NAME: FLAGS")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, nargs=2, default=[2, 6])
    parser.add_argument("--seq_len", type=parse_token_count, default=2048)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args, flags = parser.parse_known_args()
    kind = device_type()
    exchange = {}
    if kind == "cuda":
        exchange["nccl"] = real_exchange_us(torch.device("cuda", 0), args.repeats)
    device = join(args.ranks, kind)
    exchange["fake"] = exchange_us(device, args.repeats)
    keys = ("ranks", "layers", "seq_len", "warmup", "repeats")
    cases: list[Record] = []
    result: Record = {}
    for text in args.case:
        name, _, words = text.partition(":")
        case = {"case": name, "flags": shlex.split(words)}
        try:
            case |= run_case(args, [*flags, *case["flags"]], device)
        except Exception as error:  # a job that is refused is a result, too
            case["error"] = why(error)
        cases.append(case)
        print(json.dumps(case), flush=True)
        result = {
            **environment("host_time"),
            **{key: getattr(args, key) for key in keys},
            "flags": [flag for flag in flags if "/" not in flag],
            "exchange_us": exchange,
            "cases": cases,
        }
        write(args.name, result, args.out, table([result]))
    print(table([result]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
