"""Where a step's time goes, from a trace of torch's profiler, and a picture of one layer.

    python -m benchmarks.trace_share --name trace_8b_128k --trace rank0_trace.json --seq_len 128K --layers 32

Shares of wall time, from the first kernel of the step to the end of the last. An instant counts once, for
the first of these that is running:

    attention   kernels of the attention itself
    matmul      matrix products
    other       any other kernel, and copies within the device
    exchange    NCCL kernels, so: those with no kernel beside them
    copies      copies to or from the host with neither beside them
    idle        nothing

The last four are what kernels do not explain: `unhidden` (exchange + copies + other + idle).
The picture (NAME.png) shows a layer in the middle, forward and backward, a row for each stream.
The record names the trace's GPU; where it was made at another commit than this one, set BENCH_COMMIT.
Traces: bench_block.py --trace, or profiling.enable_profiling of a job.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, Record, environment, markdown, tokens, write
from torchtitan_lc.config.token_count import parse_token_count

KINDS = ("attention", "matmul", "other", "exchange", "copies")
# In this order: flash-attn-4 is built by CUTLASS too.
_NAMES = (
    ("exchange", re.compile(r"nccl", re.I)),
    ("attention", re.compile(r"flash|sdpa|fmha|attention", re.I)),
    ("matmul", re.compile(r"gemm|nvjet|xmma|cublas|cutlass|matmul|splitKreduce", re.I)),
)
_BACKWARD = re.compile(r"bwd|backward|bprop", re.I)
_COLOURS = {
    "attention": "tab:blue",
    "matmul": "tab:green",
    "other": "tab:gray",
    "exchange": "tab:red",
    "copies": "tab:orange",
}

Interval = tuple[float, float]


@dataclass(frozen=True)
class Event:
    """What ran on the device from ``start`` to ``stop`` (microseconds)."""

    kind: str
    name: str
    stream: str
    start: float
    stop: float


def kind_of(category: str, name: str) -> str:
    if category == "gpu_memcpy":
        return "other" if "DtoD" in name else "copies"
    return next((kind for kind, pattern in _NAMES if pattern.search(name)), "other")


def events_of(trace: Path) -> list[Event]:
    """Device events in order of time. Raises ValueError where there is none."""
    found = []
    for event in _read(trace)["traceEvents"]:
        category = str(event.get("cat", "")).lower()
        if event.get("ph") != "X" or category not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        stream, start = str(event["args"].get("stream", event.get("tid"))), float(event["ts"])
        kind = kind_of(category, event["name"])
        found.append(Event(kind, event["name"], stream, start, start + float(event["dur"])))
    if not found:
        raise ValueError(f"{trace.name} has no event of a GPU")
    return sorted(found, key=lambda event: event.start)


def device_of(trace: Path) -> Record:
    """The GPU that the trace is of, by its name, and how many there were; not that of this machine."""
    gpus = _read(trace).get("deviceProperties", [])
    if not gpus:
        raise ValueError(f"{trace.name} does not say which GPU it is of")
    return {"device": gpus[0]["name"], "devices": len(gpus)}


def _read(trace: Path) -> Any:
    written = trace.read_bytes()
    return json.loads(gzip.decompress(written) if trace.suffix == ".gz" else written)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals, in order, that cover the same."""
    joined: list[Interval] = []
    for start, stop in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in union(intervals))


def shares(events: Sequence[Event]) -> dict[str, float]:
    """Of the wall time from the first event to the end of the last; they add up to one."""
    began, ended = min(e.start for e in events), max(e.stop for e in events)
    wall, covered, before = ended - began, [], 0.0
    found = {}
    for kind in KINDS:
        covered += [(e.start, e.stop) for e in events if e.kind == kind]
        total = length(covered)
        found[kind] = (total - before) / wall
        before = total
    found["idle"] = 1 - before / wall
    return found


def layer_window(events: Sequence[Event], layers: int, layer: int, backward: bool) -> Interval:
    """From the first attention kernel of ``layer`` to the first of the layer that comes next (the last
    event, for the last). Recomputed forward kernels belong to backward."""
    attention = [e for e in events if e.kind == "attention"]
    first_backward = next(e.start for e in attention if _BACKWARD.search(e.name))
    mine = [e for e in attention if (e.start >= first_backward) == backward]
    if backward:
        mine = [e for e in mine if _BACKWARD.search(e.name)]
        layer = layers - 1 - layer
    each = len(mine) // layers
    start = mine[layer * each].start
    if (layer + 1) * each < len(mine):
        return start, mine[(layer + 1) * each].start
    later = [e.stop for e in events if backward or e.start < first_backward]
    return start, max(later)


def draw(events: Sequence[Event], windows: Sequence[tuple[str, Interval]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    streams = sorted({e.stream for e in events}, key=lambda s: (len(s), s))
    figure, axes = pyplot.subplots(
        len(windows), 1, figsize=(14, 2 + 2 * len(windows)), squeeze=False
    )
    for (title, (start, stop)), axis in zip(windows, axes[:, 0], strict=True):
        for event in events:
            if event.stop > start and event.start < stop:
                left, right = max(event.start, start), min(event.stop, stop)
                span = ((left - start) / 1e3, (right - left) / 1e3)
                row = streams.index(event.stream)
                axis.broken_barh([span], (row - 0.4, 0.8), facecolors=_COLOURS[event.kind])
        axis.set_yticks(range(len(streams)), [f"stream {s}" for s in streams])
        axis.set(title=title, xlabel="ms", xlim=(0, (stop - start) / 1e3))
    handles = [Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="upper right", ncols=len(handles))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def table(results: Sequence[Record]) -> str:
    kinds = [*KINDS, "idle", "unhidden"]
    rows = [
        [r["trace"], tokens(r["seq_len"]), *(f"{100 * r['shares'][kind]:.1f} %" for kind in kinds)]
        for r in results
    ]
    return markdown(["trace", "length", *kinds], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", required=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--seq_len", type=parse_token_count, required=True)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--layer", type=int, help="in the picture; the middle one if not said")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    events = events_of(args.trace)
    found = shares(events)
    found["unhidden"] = sum(found[kind] for kind in ("other", "exchange", "copies", "idle"))
    layer = args.layers // 2 if args.layer is None else args.layer
    ways = (("forward", False), ("backward", True))
    windows = [
        (f"layer {layer}, {way}", layer_window(events, args.layers, layer, back))
        for way, back in ways
    ]
    wall = max(e.stop for e in events) - min(e.start for e in events)
    facts = {"trace": args.trace.name, "seq_len": args.seq_len, "layers": args.layers}
    here = environment("trace_share")
    del here["versions"], here["allocator"]  # of this machine, which may be another one
    result = {**here, **device_of(args.trace), **facts, "wall_s": wall / 1e6, "shares": found}
    write(args.name, result, args.out, table([result]))
    draw(events, windows, args.out / f"{args.name}.png")
    print(table([result]))


if __name__ == "__main__":
    main()
