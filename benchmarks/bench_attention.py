"""Attention kernels alone: TFLOP/s forward and backward by length and heads.

    python -m benchmarks.bench_attention --name attention_h200 --kernels fa4 cudnn sdpa \
        --seq_lens 64K 128K 256K 1M --heads 1 4 --kv_heads 1 --repeats 5

Causal, one row, one device. FLOPs are those that a causal mask leaves: 2 products of half S x S x D per
head forward, 5 backward. Times are medians by CUDA events (CPU: by the clock). A shape for which memory
would not do is not tried; it and a case that fails are recorded with the reason.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch

from benchmarks.ceiling import time_call
from benchmarks.record import (
    RESULTS,
    Record,
    environment,
    markdown,
    shown,
    spread,
    tokens,
    why,
    write,
)
from benchmarks.shapes import Call, get_kernel
from benchmarks.timing import release
from torchtitan_lc.config.token_count import parse_token_count
from torchtitan_lc.tools.hardware import device_type


def run(args: argparse.Namespace, device: torch.device) -> list[Record]:
    dtype = getattr(torch, args.dtype)
    cases = []
    for seq_len, heads, kv_heads, name in product(
        args.seq_lens, args.heads, args.kv_heads, args.kernels
    ):
        if heads % kv_heads:
            continue
        case: Record = {"kernel": name, "seq_len": seq_len, "heads": heads, "kv_heads": kv_heads}
        for direction in ("forward", "backward"):
            shape = (seq_len, seq_len, heads, kv_heads, args.head_dim)
            call = Call(direction, *shape, causal=True)
            try:
                kernel = get_kernel(name, device, dtype, args.head_dim)
                case["kernel"] = kernel.name
                times = time_call(kernel, call, dtype, device, args.repeats).steady
                case[f"{direction}_s"] = spread(times)
                case[f"{direction}_tflops"] = spread([call.flops / t / 1e12 for t in times])
            except Exception as error:  # kernels raise what they like; all of it is written down
                case["error"] = f"{direction}: {why(error)}"
                break
            finally:
                release(device)
        cases.append(case)
        print(json.dumps(case), flush=True)
    return cases


def table(results: Sequence[Record]) -> str:
    rows = []
    for case in (case for result in results for case in result["cases"]):
        shape = [tokens(case["seq_len"]), str(case["heads"]), str(case["kv_heads"]), case["kernel"]]
        speeds = [shown(case.get(f"{way}_tflops"), 0) for way in ("forward", "backward")]
        rows.append([*shape, *speeds, case.get("error", "")])
    headers = ["tokens", "heads", "KV heads", "kernel", "forward", "backward, TFLOP/s", "failed"]
    return markdown(headers, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", required=True)
    parser.add_argument("--kernels", nargs="+", default=["fa4", "cudnn", "sdpa"])
    parser.add_argument("--seq_lens", type=parse_token_count, nargs="+", required=True)
    parser.add_argument("--heads", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--kv_heads", type=int, nargs="+", default=[1])
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    device = torch.device(device_type())
    cases = run(args, device)
    result = {**environment("bench_attention"), "dtype": args.dtype, "repeats": args.repeats}
    result |= {"head_dim": args.head_dim, "cases": cases}
    write(args.name, result, args.out, table([result]))
    print(table([result]))


if __name__ == "__main__":
    main()
