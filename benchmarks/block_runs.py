"""Runs blocks in turns at several lengths: what bench_block.py and bench_peers.py have in common."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.blocks import PUBLISHED, BlockCase, Plan, Setting, cut
from benchmarks.ceiling import Ceiling
from benchmarks.record import (
    RESULTS,
    Record,
    environment,
    markdown,
    number,
    shown,
    spread,
    tokens,
    write,
)
from benchmarks.shapes import join, peers
from benchmarks.timing import Case, attempt, measure, release
from torchtitan_lc.config.token_count import parse_token_count
from torchtitan_lc.models.llama3 import FLAVORS
from torchtitan_lc.tools.hardware import device_type


class Comparable(Protocol):
    """A block that can be run at any length."""

    def at(self, seq_len: int, h: Tensor, result: Record) -> Case: ...


Contender = tuple[Record, Callable[[], Comparable]]
"""How a case is called in the results, and how to build it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", required=True)
    parser.add_argument("--flavor", default="8B", choices=FLAVORS)
    parser.add_argument("--seq_lens", type=parse_token_count, nargs="+", required=True)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=1, help="blocks in a row; seconds are of all")
    parser.add_argument("--strategies", nargs="+", default=["upipe:1"])
    parser.add_argument("--modes", nargs="+", default=["selective"])
    parser.add_argument("--kernels", nargs="+", default=["auto"])
    for switch in ("offload", "compile"):
        parser.add_argument(f"--{switch}", nargs="+", default=["off"], choices=["on", "off"])
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--published_kernels", nargs="*", default=[])
    parser.add_argument("--projection_tokens", type=parse_token_count, default=16384)
    parser.add_argument("--mlp_tokens", type=parse_token_count, default=16384)
    parser.add_argument("--hold_normed_input", action="store_true")
    parser.add_argument("--send_kv_gradients", action="store_true", help="not summed over stages")
    parser.add_argument("--overlap_exchange", action="store_true")
    parser.add_argument("--early_fetch", action="store_true", help="of what is offloaded")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip_memory", action="store_true", help="saves two steps a case")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--matmul_size", type=int, default=8192)
    parser.add_argument("--trace", type=Path, help="folder for a profiler trace of each case")
    parser.add_argument("--out", type=Path, default=RESULTS)


def make_setting(args: argparse.Namespace) -> Setting:
    return Setting(
        args=cut(FLAVORS[args.flavor], args.layers),
        device=join(args.ranks, device_type()),
        dtype=getattr(torch, args.dtype),
        projection_tokens=args.projection_tokens,
        mlp_tokens=args.mlp_tokens,
        hold_normed_input=args.hold_normed_input,
        sum_kv_gradients=not args.send_kv_gradients,
        overlap_exchange=args.overlap_exchange,
        early_fetch=args.early_fetch,
        backend=args.backend,
    )


def contenders(
    args: argparse.Namespace, setting: Setting, weights: dict[str, Tensor]
) -> list[Contender]:
    """Every combination of this project's, then the published schedule once per kernel."""
    switches = [[text == "on" for text in words] for words in (args.offload, args.compile)]
    ours = product(args.strategies, args.modes, args.kernels, *switches)
    plans = [Plan(*words) for words in ours]
    plans += [Plan(PUBLISHED, "full", kernel, offload=True) for kernel in args.published_kernels]
    return [(plan.labels(), partial(BlockCase, plan, setting, weights)) for plan in plans]


def run(
    args: argparse.Namespace, setting: Setting, contending: Sequence[Contender], script: str
) -> Record:
    """Measures, prints and writes everything; the record."""
    ceiling = Ceiling(setting.args, setting.dtype, setting.device, args.matmul_size)
    device = setting.device
    blocks: list[tuple[Record, Comparable | None]] = []
    for labels, build in contending:
        result = dict(labels)
        blocks.append((result, attempt(result, build, device)))
    results: list[Record] = []
    for seq_len in args.seq_lens:
        found = _at_length(
            args, setting, blocks, ceiling, seq_len, warm=not results and args.repeats > 0
        )
        results += found
        if dist.get_rank() == 0:
            print("\n".join(map(json.dumps, found)), flush=True)
    keys = ["flavor", "layers", "ranks", "seq_lens", "projection_tokens", "mlp_tokens", "dtype"]
    keys += ["hold_normed_input", "send_kv_gradients", "overlap_exchange", "early_fetch", "repeats"]
    record = {
        **environment(script),
        "peers": peers(),
        **{key: getattr(args, key) for key in keys},
        "matmul_tflops": ceiling.rate / 1e12,
        "matmul_burst_tflops": ceiling.burst_rate / 1e12,
        "cases": results,
    }
    if dist.get_rank() == 0:
        write(args.name, record, args.out, table([record]))
        print(table([record]))
    return record


def _at_length(
    args: argparse.Namespace,
    setting: Setting,
    blocks: Sequence[tuple[Record, Comparable | None]],
    ceiling: Ceiling,
    seq_len: int,
    warm: bool,
) -> list[Record]:
    device, local = setting.device, seq_len // args.ranks
    h = torch.randn(1, local, setting.args.dim, device=device, dtype=setting.dtype)
    h.requires_grad_()
    results: list[Record] = []
    cases: list[tuple[Comparable, Case]] = []
    for labels, block in blocks:
        result = {"seq_len": seq_len, **labels}
        results.append(result)
        case = attempt(result, partial(block.at, seq_len, h, result), device) if block else None
        if block and case and "error" not in result:
            cases.append((block, case))
    measure(
        [case for _, case in cases],
        repeats=args.repeats,
        device=device,
        warm=warm,
        memory=not args.skip_memory,
    )
    done = [(block, case) for block, case in cases if not case.failed]
    for block, case in done:
        if isinstance(block, BlockCase):
            attempt(case.result, partial(_add_ceiling, block, case, ceiling, local), device)
    _compare([case for _, case in done])
    if args.trace:
        _trace([case for _, case in done], args.trace)
    return results


def _add_ceiling(block: BlockCase, case: Case, ceiling: Ceiling, local: int) -> None:
    """The ceiling of the step that ran last, and the fraction of it that was reached."""
    if block.counting is None or not case.seconds:  # a kernel that computes nothing, or no time
        return
    found = ceiling.of(block.kernel, block.counting.calls, local, case.result["mode"])
    for name, best in (("ceiling_fraction", "seconds"), ("burst_fraction", "burst_seconds")):
        case.result[name] = spread([found[best] / seconds for seconds in case.seconds])
    case.result["ceiling"] = found


def _compare(cases: list[Case]) -> None:
    """Adds to each case of this project how many times its time others took, turn by turn."""
    for case in cases:
        for other in cases if case.result["kind"] == "ours" else ():
            if other.result["kind"] != "ours":
                pairs = zip(other.seconds, case.seconds, strict=True)
                name = f"{other.result['strategy']}, {other.result['kernel']}"
                over = case.result.setdefault("time_of_others", {})
                over[name] = spread([theirs / own for theirs, own in pairs])


def _trace(cases: list[Case], folder: Path) -> None:
    """One more step of each case under torch's profiler, for trace_share.py."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        with torch.profiler.profile() as profiler:
            case.step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        case.clean()
        words = [str(case.result[key]) for key in ("strategy", "mode", "kernel", "offload")]
        name = "_".join([tokens(case.result["seq_len"]), *words]).replace(":", "").replace(" ", "")
        profiler.export_chrome_trace(str(folder / f"{name}_rank{dist.get_rank()}.json.gz"))
        release(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def table(results: Sequence[Record]) -> str:
    cases = [case for result in results for case in result["cases"]]
    others = list(dict.fromkeys(name for case in cases for name in case.get("time_of_others", {})))
    headers = ["length", "case", "kernel", "s", "of ceiling", "peak, B", "reserved, GiB"]
    headers += [f"time of {name}, over this" for name in others]
    rows = []
    for case in cases:
        name = f"{case['strategy']}, {case['mode']}"
        name += ", offload" * case["offload"] + ", compiled" * case["compile"]
        row = [tokens(case["seq_len"]), name, case["kernel"]]
        if "error" in case:
            rows.append([*row, case["error"], *[""] * (len(headers) - 4)])
            continue
        row += [shown(case.get("seconds")), shown(case.get("ceiling_fraction"))]
        row += [number(case.get("peak_b")), number(case.get("reserved_gib"), 1)]
        over = case.get("time_of_others", {})
        rows.append([*row, *(shown(over.get(name)) for name in others)])
    return markdown(headers, rows)
