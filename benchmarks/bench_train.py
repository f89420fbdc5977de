"""Train for a few steps through run_train.sh and record speed and memory.

    python -m benchmarks.bench_train --name NAME --config llama8b_64k.toml --steps 5 \
        [--limit SECONDS] [--section.key value ...]

Writes benchmarks/results/NAME.json: command, resolved config, commit, versions, device, every logged
step, over the steps after the first the median and spread of the step time and tokens per second, and the
peak of memory: of the GPU that allocated and reserved most, and of the host, all ranks' resident sets added
up. A run that fails, or is ended after --limit seconds, is recorded with the reason, its exit code and the
end of its output.

Built-in models can be cut to the layers that fit, by in_job.py: --model.name=qwen3_cut --model.flavor=32B-8.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import limited
from benchmarks.record import (
    RESULTS,
    ROOT,
    Record,
    environment,
    markdown,
    parser_beside_a_job,
    shown,
    spread,
    without_paths,
    write,
)

MEMORY_FOLDER = "BENCH_MEMORY_FOLDER"  # where in_job.py writes; it does nothing without it


def run(
    config: str,
    steps: int,
    flags: Sequence[str],
    *,
    ngpu: int | None = None,
    limit: float | None = None,
) -> Record:
    """ngpu: processes, None for NGPU or every visible GPU. limit: seconds for the whole, start included."""
    with tempfile.TemporaryDirectory() as folder:
        job = job_flags(config, steps, flags)
        command = [str(ROOT / "run_train.sh"), *job, f"--job.dump_folder={folder}"]
        memory_folder = Path(folder) / "memory"
        memory_folder.mkdir()
        environment = {MEMORY_FOLDER: str(memory_folder), "PYTHON": sys.executable}
        if ngpu is not None:
            environment["NGPU"] = str(ngpu)
        ended = limited.run(command, environment, limit)
        result: Record = {
            "command": " ".join(["./run_train.sh", *job]),
            "ngpu": ngpu or os.environ.get("NGPU", "all visible"),
            "seconds": round(ended.seconds, 1),
            "exit_code": ended.exit_code,
        }
        metrics = Path(folder) / "metrics.jsonl"
        if metrics.exists():
            logged = [json.loads(line) for line in metrics.read_text().splitlines()]
            result["steps"] = logged
            later = [line for line in logged if line["step"] > 1]
            if later:
                for key in ("time_s", "tps", "memory_gib"):
                    result[key] = spread([line[key] for line in later])
            result["config"] = without_paths((Path(folder) / "config.toml").read_text(), folder)
        result["memory"] = peak_memory(memory_folder)
        lines = without_paths(ended.output, folder).splitlines()
        if ended.ended_early:
            result["failed"] = f"ended after its limit of {limit:.0f} s"
        elif ended.exit_code:
            lines += without_paths(_other_ranks(Path(folder)), folder).splitlines()
            result["failed"] = f"exit code {ended.exit_code}: {_reason(lines)}"
        # A failure is kept as it was; of a success, what the framework itself said.
        said = [line for line in lines if line.startswith("[titan]")]
        result["log"] = lines[-60:] if ended.exit_code else said
        return result


def job_flags(config: str, steps: int, flags: Sequence[str]) -> list[str]:
    """What the job is started with, but for its folder. A later flag wins, so ``flags`` may name another
    module to import."""
    return [
        f"--config={config}",
        f"--training.steps={steps}",
        "--metrics.log_freq=1",
        "--checkpoint.no_enable",
        "--experimental.custom_import=benchmarks.in_job",
        *flags,
    ]


def peak_memory(folder: Path) -> dict[str, float]:
    """From the lines of in_job.py, in GiB: of the rank with most on its GPU, and of the host all ranks'."""
    ranks = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("rank*.jsonl"))
    ]
    if not ranks:
        return {}
    peaks = {"host_gib": sum(max(line["host_gib"] for line in lines) for lines in ranks)}
    for key in ("allocated_gib", "reserved_gib"):
        found = [line[key] for lines in ranks for line in lines if key in line]
        if found:
            peaks[key] = max(found)
    return peaks


def _other_ranks(folder: Path) -> str:
    """The end of what the first rank with a traceback left in a file: only rank 0's is shown."""
    for path in sorted(folder.glob("logs/*/rank*.stderr.log")):
        text = path.read_text(errors="replace")
        if "Traceback" in text:
            return "\n".join(text.splitlines()[-20:])
    return ""


def _reason(lines: Sequence[str]) -> str:
    """The last line that names an error, else the last one."""
    named = [line.strip() for line in lines if re.match(r"\s*[\w.]*Error\b", line)]
    said = [line.strip() for line in lines if line.strip()]
    return next(reversed(named or said), "no output")[:300]


def table(results: Sequence[Record]) -> str:
    rows = []
    for r in results:
        figures = [shown(r.get("time_s"), 2), shown(r.get("tps"), 0), shown(r.get("memory_gib"), 1)]
        failed = r.get("failed", "" if r["exit_code"] == 0 else f"exit code {r['exit_code']}")
        rows.append([f"`{r['name']}`", f"`{r['commit'][:7]}`", *figures, failed])
    headers = ["record", "commit", "s per step", "tokens/s per GPU", "reserved, GiB", "failed"]
    return markdown(headers, rows)


def main() -> None:
    parser = parser_beside_a_job(__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit", type=float, help="seconds, start included")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args, flags = parser.parse_known_args()
    measured = run(args.config, args.steps, flags, limit=args.limit)
    result = {**environment("bench_train"), **measured}
    write(args.name, result, args.out)
    summary = {key: result.get(key) for key in ("exit_code", "failed", "time_s", "tps", "memory")}
    losses = [round(line["loss"], 4) for line in result.get("steps", [])]
    print(json.dumps({"name": args.name, **summary, "losses": losses}))


if __name__ == "__main__":
    main()
