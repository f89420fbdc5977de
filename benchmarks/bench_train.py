"""Train for a few steps through run_train.sh and record speed and memory.

    PYTHONPATH=. python benchmarks/bench_train.py --name NAME --config llama8b_64k.toml --steps 5 \
        [--section.key value ...]

Writes benchmarks/results/NAME.json: command, resolved config, commit, versions, device, every logged
step, and over the steps after the first the median and spread of the step time and tokens per second.
A run that fails is recorded with its exit code and the end of its output.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import (
    RESULTS,
    ROOT,
    Record,
    environment,
    markdown,
    shown,
    spread,
    without_paths,
    write,
)


def run(config: str, steps: int, flags: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(ROOT / "run_train.sh"),
            f"--config={config}",
            f"--job.dump_folder={folder}",
            f"--training.steps={steps}",
            "--metrics.log_freq=1",
            "--checkpoint.no_enable",
            *flags,
        ]
        began = time.time()
        done = subprocess.run(command, capture_output=True, text=True)
        shown = ["./run_train.sh", *(c for c in command[1:] if "dump_folder" not in c)]
        result: dict[str, Any] = {
            "command": " ".join(shown),
            "ngpu": os.environ.get("NGPU", "all visible"),
            "seconds": round(time.time() - began, 1),
            "exit_code": done.returncode,
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
        lines = without_paths(done.stdout + done.stderr, folder).splitlines()
        # A failure is kept as it was; of a success, what the framework itself said.
        said = [line for line in lines if line.startswith("[titan]")]
        result["log"] = lines[-60:] if done.returncode else said
        return result


def table(results: Sequence[Record]) -> str:
    rows = []
    for r in results:
        figures = [shown(r.get("time_s"), 2), shown(r.get("tps"), 0), shown(r.get("memory_gib"), 1)]
        failed = "" if r["exit_code"] == 0 else f"exit code {r['exit_code']}"
        rows.append([f"`{r['name']}`", f"`{r['commit'][:7]}`", *figures, failed])
    headers = ["record", "commit", "s per step", "tokens/s per GPU", "reserved, GiB", "failed"]
    return markdown(headers, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--name", required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args, flags = parser.parse_known_args()
    result = {**environment("bench_train"), **run(args.config, args.steps, flags)}
    write(args.name, result, args.out)
    summary = {key: result.get(key) for key in ("exit_code", "time_s", "tps", "memory_gib")}
    losses = [round(line["loss"], 4) for line in result.get("steps", [])]
    print(json.dumps({"name": args.name, **summary, "losses": losses}))


if __name__ == "__main__":
    main()
