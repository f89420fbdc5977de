"""What every benchmark writes down beside its figures."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def commit() -> str:
    """The commit of the checkout, with "+" for changes; where it is no git repository, BENCH_COMMIT."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "HEAD")
    if not head:
        return os.environ.get("BENCH_COMMIT", "unknown")
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def environment() -> dict[str, Any]:
    """commit, date, device, how many are visible, and versions."""
    import torch

    from torchtitan_lc.tools.hardware import device_name, device_type, versions

    kind = device_type()
    return {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "device": device_name(kind),
        "devices": torch.cuda.device_count() if kind == "cuda" else 1,
        "versions": versions(),
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def write(name: str, result: dict[str, Any], folder: Path = RESULTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"name": name, **result}, indent=1) + "\n")
    return path


def without_paths(text: str, folder: str) -> str:
    """Results say nothing of the machine's folders."""
    return text.replace(folder, "DUMP_FOLDER").replace(f"{ROOT}/", "")
