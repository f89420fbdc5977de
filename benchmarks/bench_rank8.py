"""A whole model as one rank of 8: the real trainer on torch's fake process group.

    python -m benchmarks.bench_rank8 --name rank8_8b --config llama8b_1m.toml --seq_lens 128K 256K 512K \
        --exchange_gbps benchmarks/results/exchange_2xh200.json [--section.key value ...]

Config, data, FSDP2, checkpointing, offload, optimizer are those of the job; arguments that it does not
know go to it. What differs: each row is one document, the self-check is off, nothing is saved, and
peers take no time and answer with copies of what this rank sent. So time is that of a rank without its
traffic; the bytes that would have left it are counted, and with --exchange_gbps (a number, or a result of
exchange.py) given as seconds, and as tokens/s if not one of them were hidden.

--layers 2 4: the model cut to so many layers; from the two largest cuts, time of the whole is extrapolated, and
said to be. Memory at lengths whose step takes hours: bench_plan.py. With --debug.share_offload_buffers a host
smaller than the job's will do; what the job would need is counted all the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from benchmarks.meters import Traffic, exchange_gbps, extrapolated
from benchmarks.record import (
    RESULTS,
    Record,
    environment,
    markdown,
    number,
    parser_beside_a_job,
    shown,
    spread,
    tokens,
    why,
    without_paths,
    write,
)
from benchmarks.shapes import join
from benchmarks.timing import GIB, now, release
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.manager import load_config, to_toml
from torchtitan_lc.config.token_count import parse_token_count
from torchtitan_lc.dry_run.job import alone
from torchtitan_lc.memory.host_use import HostUse
from torchtitan_lc.models.spec import get_model
from torchtitan_lc.preflight import check_job
from torchtitan_lc.tools.hardware import device_type
from torchtitan_lc.trainer import Trainer


def job(flags: Sequence[str], seq_len: int | None, layers: int | None, ranks: int) -> JobConfig:
    lengths = [] if seq_len is None else [f"--training.seq_len={seq_len}"]
    config = alone(load_config([*flags, *lengths], quiet=True))
    if layers is not None:
        flavors = cast(dict[str, Any], get_model(config.model.name).flavors)
        name = f"{config.model.flavor}, {layers} layers"
        flavors[name] = dataclasses.replace(flavors[config.model.flavor], n_layers=layers)
        config.model.flavor = name
    check_job(config, ranks, device_type(), ranks_per_node=ranks, quiet=True)
    return config


def run_job(config: JobConfig, args: argparse.Namespace, device: torch.device) -> Record:
    """Steps of one trainer: seconds, tokens per second and GPU, memory of device and host, traffic."""
    host, traffic = HostUse(), Traffic()
    with host.counting():
        trainer = Trainer(config, device)
        seconds = []
        try:
            with trainer.metrics(0) as metrics:
                for step in range(args.warmup + args.repeats):
                    traffic = Traffic()
                    began = now(device)
                    with traffic.counting():
                        trainer.train_step(metrics)
                    if step >= args.warmup:
                        seconds.append(now(device) - began)
        finally:
            trainer.close()
    row = config.training.seq_len * trainer.rows_per_step
    result: Record = {
        "seconds": spread(seconds),
        "times": seconds,
        "tps": spread([row / trainer.world_size / s for s in seconds]),
        "host_gib": host.peak / GIB,
        "traffic_gib": {"exchange": traffic.exchange / GIB, "fsdp": traffic.fsdp / GIB},
    }
    if device.type == "cuda":
        result["allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
        result["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    if args.exchange_gbps:
        out = traffic.exchange + traffic.fsdp
        unhidden = out / args.exchange_gbps / 1e9
        result["traffic_s"] = unhidden
        result["tps_no_traffic_hidden"] = spread(
            [row / trainer.world_size / (s + unhidden) for s in seconds]
        )
    return result


def run(
    args: argparse.Namespace, flags: list[str], device: torch.device
) -> tuple[list[Record], str]:
    cases, config_text = [], ""
    for seq_len in args.seq_lens:
        cuts: dict[int, list[float]] = {}
        for layers in args.layers:
            case: Record = {"seq_len": seq_len, "layers": layers}
            release(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            with tempfile.TemporaryDirectory() as folder:
                try:
                    config = job(
                        [*flags, f"--job.dump_folder={folder}"], seq_len, layers, args.ranks
                    )
                    case["seq_len"] = config.training.seq_len
                    config_text = without_paths(to_toml(config), folder)
                    case |= run_job(config, args, device)
                except Exception as error:  # out of memory is a result, too
                    case["error"] = why(error)
            if "error" not in case and layers is not None:
                cuts[layers] = case["times"]
            cases.append(case)
            print(json.dumps(case), flush=True)
        whole = extrapolated(cuts, args.whole_layers)
        if whole is not None:
            tps = seq_len / args.ranks / whole
            line = {"seq_len": seq_len, "layers": args.whole_layers}
            cases.append({**line, "extrapolated_from": sorted(cuts)[-2:], "tps": spread([tps])})
    return cases, config_text


def table(results: Sequence[Record]) -> str:
    headers = ["length", "layers", "s per step", "tokens/s per GPU", "if no traffic were hidden"]
    headers += ["allocated, GiB", "reserved", "host"]
    rows = []
    for case in (case for result in results for case in result["cases"]):
        layers = "all" if case["layers"] is None else str(case["layers"])
        layers += f" (from {case['extrapolated_from']})" if "extrapolated_from" in case else ""
        row = [tokens(case["seq_len"]) if case["seq_len"] else "", layers]
        if "error" in case:
            rows.append([*row, case["error"], *[""] * (len(headers) - 3)])
            continue
        times = [(case.get("seconds"), 2), (case["tps"], 0), (case.get("tps_no_traffic_hidden"), 0)]
        if "extrapolated_from" in case:  # one figure, without a spread
            row += ["", number(case["tps"]["median"], 0), ""]
        else:
            row += [shown(value, digits) for value, digits in times]
        rows.append(
            [*row, *(number(case.get(f"{k}_gib"), 1) for k in ("allocated", "reserved", "host"))]
        )
    return markdown(headers, rows)


def main() -> None:
    parser = parser_beside_a_job(__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--seq_lens", type=parse_token_count, nargs="+", default=[None])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, nargs="+", default=[None])
    parser.add_argument("--whole_layers", type=int, default=32, help="for --layers with two cuts")
    parser.add_argument("--exchange_gbps", type=exchange_gbps)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args, flags = parser.parse_known_args()
    device = join(args.ranks, device_type())
    cases, config_text = run(args, flags, device)
    keys = ("ranks", "exchange_gbps", "warmup", "repeats")
    result = {
        **environment("bench_rank8"),
        **{key: getattr(args, key) for key in keys},
        "flags": [flag for flag in flags if "/" not in flag],
        "config": config_text,
        "cases": cases,
    }
    write(args.name, result, args.out, table([result]))
    print(table([result]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
