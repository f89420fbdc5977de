"""Host memory of ranks that load a Hugging Face folder: the folder is made up, the load is a job's own.

    python -m benchmarks.bench_load --name load_8b_2ranks_cpu --ranks 2 --model.flavor=8B

Makes a bf16 folder of random values in the shapes of a model (the exporter's own writer, so one tensor is in
memory at a time) and starts ranks on the CPU, over gloo. Each builds the real Trainer, whose shards are first
filled with NaN: all their pages are resident before the load, and what the load leaves out is found. Then it
loads as `checkpoint.initial_load_in_hf` does. Arguments that it does not know go to the job; its weights are
in bfloat16 unless they say otherwise. --folder: make it there and keep it, or load what it holds; else it is
made in the folder for temporary files and deleted.

What counts is the resident set of a process: its anonymous pages, and pages of mapped files (libraries, and
safetensors as they are read), counted for each rank that maps them, though they lie in memory once. `peak` is
the kernel's high-water mark, reset before the load; where it may not be reset, the most of what a thread saw
every few milliseconds, as for the peaks of anonymous pages and of pages of files. `start` is before the model
is built, `before` between the filled shards and the load. `extra` is peak - start - the rank's shards. A rank
is within the bound when all of its peak, start included, is at most its shards + the model's largest tensor
+ 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks import limited
from benchmarks.record import (
    RESULTS,
    ROOT,
    Record,
    environment,
    markdown,
    number,
    parser_beside_a_job,
    read,
    without_paths,
    write,
)
from benchmarks.timing import GIB
from torchtitan_lc.components.hf_export import write_folder
from torchtitan_lc.components.hf_folder import has_weights
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.manager import load_config, to_toml
from torchtitan_lc.distributed.setup import init_distributed
from torchtitan_lc.preflight import check_job, job_hf, job_model, parameter_shapes
from torchtitan_lc.tools.hardware import device_name
from torchtitan_lc.trainer import Trainer

JOB = (
    *("--training.dtype=bfloat16", "--checkpoint.enable", "--checkpoint.initial_load_in_hf"),
    *("--checkpoint.export_dtype=bfloat16", "--attention.no_self_check"),
)
SLACK = GIB
SAMPLED_EVERY = 0.005  # seconds


# -- memory


def resident() -> dict[str, int]:
    """Bytes of this process: peak, rss and of that anon and file."""
    names = {"VmHWM": "peak", "VmRSS": "rss", "RssAnon": "anon", "RssFile": "file"}
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {ours: int(fields[theirs].split()[0]) * 1024 for theirs, ours in names.items()}


class PeakResident:
    """A context; afterwards ``most`` is the most of rss, anon and file within it, in bytes, and ``exact``
    whether that of rss is the kernel's mark and not only the most of the samples."""

    def __init__(self) -> None:
        self.most = {"rss": 0, "anon": 0, "file": 0}
        self.exact = True
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakResident:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:  # not every container may
            self.exact = False
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        now = self._look()
        if self.exact:
            self.most["rss"] = now["peak"]

    def _watch(self) -> None:
        while not self._done.wait(SAMPLED_EVERY):
            self._look()

    def _look(self) -> dict[str, int]:
        now = resident()
        self.most = {key: max(most, now[key]) for key, most in self.most.items()}
        return now


# -- the folder


def make_folder(folder: Path, config: JobConfig) -> None:
    """Random bf16 tensors of the job's model, by the names and in the files of an export."""
    model = job_model(config)
    form = job_hf(config, model)
    if form is None:
        raise SystemExit(f"{config.model.name} has no form at Hugging Face")
    shapes = {form.name(ours): shape for ours, shape in parameter_shapes(model).items()}
    write_folder(folder, shapes, random_tensors(shapes, form.dtype), form)


def random_tensors(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for shape in shapes.values():
        yield torch.empty(shape, dtype=dtype).uniform_(-1, 1, generator=generator)


# -- a rank


class NanTrainer(Trainer):
    """First values that a load must replace: NaN, and not the hash of every index, which takes a CPU minutes
    per 1e9 parameters."""

    def _fill(self, module: nn.Module) -> None:
        module.to_empty(device=self.device)
        with torch.no_grad():
            for shard in shards(module):
                shard.fill_(float("nan"))


def shards(module: nn.Module) -> list[Tensor]:
    """This rank's part of every parameter."""
    tensors = [parameter.detach() for parameter in module.parameters()]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def load_as_rank(config: JobConfig) -> Record:
    """This rank's memory before and while it loads, in bytes."""
    device = init_distributed("cpu", config.comm.init_timeout_seconds, config.comm.trace_buf_size)
    start = resident()
    trainer = NanTrainer(config, device)
    try:
        before = resident()
        began = time.perf_counter()
        with PeakResident() as peak:
            trainer.checkpointer.load()
        seconds = time.perf_counter() - began
        mine = shards(trainer.module)
        if any(shard.isnan().any() for shard in mine):
            raise RuntimeError("the load has left values out")
        parameters = list(trainer.module.parameters())
        found = {
            "rank": dist.get_rank(),
            "share": sum(shard.nbytes for shard in mine),
            "tensor": max(p.numel() * p.element_size() for p in parameters),
            "start": start["rss"],
            **{f"before{suffix(key)}": before[key] for key in peak.most},
            **{f"peak{suffix(key)}": most for key, most in peak.most.items()},
            "peak_is_exact": peak.exact,
            "load_seconds": round(seconds, 2),
        }
    finally:
        trainer.close()
    dist.destroy_process_group()
    return found


def suffix(key: str) -> str:
    return "" if key == "rss" else f"_{key}"


# -- all ranks


def measure(ranks: int, flags: Sequence[str], limit: float | None) -> list[Record]:
    """What each rank found. SystemExit with the end of the output where a rank failed."""
    meeting = ("--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--local_addr")
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", str(ranks), *meeting)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    added = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, *launcher, "localhost", "-m", "benchmarks.bench_load"]
        command += ["--name", "rank", "--as_rank", "--out", out, *flags]
        ended = limited.run(command, added, limit)
        if ended.exit_code:
            print(ended.output[-6000:], file=sys.stderr)
            raise SystemExit("ended after its limit" if ended.ended_early else "a rank failed")
        return [read(Path(out) / f"rank{rank}.json") for rank in range(ranks)]


def judged(rank: Record) -> Record:
    """With what the load took above start and shards, and whether the whole peak is within the bound."""
    bound = rank["share"] + rank["tensor"] + SLACK
    extra = rank["peak"] - rank["start"] - rank["share"]
    return {**rank, "extra": extra, "bound": bound, "within": rank["peak"] <= bound}


def in_gib(rank: Record) -> Record:
    """What is bytes in a record of ``judged`` as GiB, and named so."""
    plain = {key: rank[key] for key in ("rank", "peak_is_exact", "within", "load_seconds")}
    return plain | {f"{key}_gib": rank[key] / GIB for key in rank if key not in plain}


def table(results: Sequence[Record]) -> str:
    headers = ["record", "rank", "its shards, GiB", "largest tensor", "start", "before", "peak"]
    headers += ["anonymous", "of files", "above start and shards", "bound", "within", "s"]
    keys = ["share", "tensor", "start", "before"]
    keys += ["peak", "peak_anon", "peak_file", "extra", "bound"]
    rows = [
        [
            *(f"`{result['name']}`", str(rank["rank"])),
            *(number(rank[f"{key}_gib"]) for key in keys),
            *("yes" if rank["within"] else "no", number(rank["load_seconds"], 0)),
        ]
        for result in results
        for rank in result["ranks"]
    ]
    return markdown(headers, rows)


def main() -> None:
    parser = parser_beside_a_job(__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="keep the made-up weights here")
    parser.add_argument("--limit", type=float, help="seconds that the ranks may take")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--as_rank", action="store_true", help=argparse.SUPPRESS)
    args, flags = parser.parse_known_args()
    if args.as_rank:
        found = load_as_rank(load_config(flags, quiet=True))
        (args.out / f"rank{found['rank']}.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch) / "hf"
        paths = (f"--checkpoint.initial_load_path={folder}", f"--job.dump_folder={scratch}/job")
        job = [*JOB, *flags, *paths]
        config = load_config(job, quiet=True)
        if not has_weights(folder):
            if folder.exists():
                raise SystemExit(f"{folder} is there and holds no weights")
            make_folder(folder, config)
        check_job(config, args.ranks, "cpu", ranks_per_node=args.ranks, quiet=True)
        sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
        measured = [in_gib(judged(rank)) for rank in measure(args.ranks, job, args.limit)]
        settings = to_toml(config).replace(str(folder), "HF_FOLDER")
    result = {
        **environment("bench_load"),
        **{"device": device_name("cpu"), "devices": 1},
        "folder": {"files": len(sizes), "gib": sum(sizes) / GIB},
        "slack_gib": SLACK / GIB,
        "ranks": measured,
        "config": without_paths(settings, scratch),
    }
    text = table([{"name": args.name, **result}])
    write(args.name, result, args.out, text)
    print(text)


if __name__ == "__main__":
    main()
