"""How fast ranks exchange heads, and how fast the host takes and gives: what traffic costs.

    torchrun --nproc_per_node 2 -m benchmarks.exchange --name exchange_2xh200 --mib 64 256 1024 2048

- all-to-all of buffers of several sizes: GB/s (10^9 bytes) that leave each rank, size x (ranks - 1) /
  ranks / time of the slowest rank;
- copies between device and pinned host memory, each way alone and both at once, all ranks together:
  GB/s each way.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.record import RESULTS, Record, environment, markdown, shown, spread, write
from benchmarks.shapes import are_real, join
from benchmarks.timing import now, slowest
from torchtitan_lc.tools.hardware import device_type

MIB = 2**20


def rates(moved: int, fn: Callable[[], object], device: torch.device, repeats: int) -> Record:
    """GB/s of ``repeats`` calls that move ``moved`` bytes each, after one other."""
    fn()
    times = []
    for _ in range(repeats):
        dist.barrier()
        began = now(device)
        fn()
        times.append(now(device) - began)
    return spread([moved / t / 1e9 for t in slowest(times, device)])


def exchanges(sizes: Sequence[int], device: torch.device, repeats: int) -> list[Record]:
    ranks, found = dist.get_world_size(), []
    for mib in sizes:
        sent = torch.randn(mib * MIB // 4 // ranks * ranks, device=device)
        received = torch.empty_like(sent)
        moved = sent.numel() * 4 * (ranks - 1) // ranks

        def exchange(received: torch.Tensor = received, sent: torch.Tensor = sent) -> None:
            dist.all_to_all_single(received, sent)

        found.append({"mib": mib, "gbps": rates(moved, exchange, device, repeats)})
    return found


def copies(mib: int, device: torch.device, repeats: int) -> Record:
    """Out (device to host), in, and both at once on streams of their own."""
    on_gpu = device.type == "cuda"
    there = [torch.randn(mib * MIB // 4, device=device) for _ in range(2)]
    host = [torch.empty(mib * MIB // 4, pin_memory=on_gpu) for _ in range(2)]
    streams = [torch.cuda.Stream() if on_gpu else None for _ in range(2)]

    def out() -> None:
        with torch.cuda.stream(streams[0]):
            host[0].copy_(there[0], non_blocking=True)

    def back() -> None:
        with torch.cuda.stream(streams[1]):
            there[1].copy_(host[1], non_blocking=True)

    def both() -> None:
        out()
        back()

    ways = {"device_to_host": out, "host_to_device": back, "both_each_way": both}
    return {name: rates(mib * MIB, fn, device, repeats) for name, fn in ways.items()}


def table(results: Sequence[Record]) -> str:
    rows = []
    for result in results:
        where = f"{result['ranks']} x {result['device']}"
        for line in result["all_to_all"]:
            rows.append([where, f"all-to-all, {line['mib']} MiB per rank", shown(line["gbps"], 0)])
        for name, value in result["host_copies"].items():
            rows.append([where, f"host copy, {name.replace('_', ' ')}", shown(value, 1)])
    return markdown(["device", "what", "GB/s"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", required=True)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256, 1024, 2048])
    parser.add_argument("--copy_mib", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not are_real():
        raise SystemExit("start it with torchrun: a rank alone exchanges nothing")
    device = join(int(os.environ["WORLD_SIZE"]), device_type())
    result = {
        **environment("exchange"),
        "ranks": dist.get_world_size(),
        "all_to_all": exchanges(args.mib, device, args.repeats),
        "host_copies": copies(args.copy_mib, device, args.repeats),
    }
    if dist.get_rank() == 0:
        write(args.name, result, args.out, table([result]))
        print(table([result]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
