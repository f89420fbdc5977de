"""What every benchmark writes down beside its figures, and how tables are laid out."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Record = dict[str, Any]


def commit() -> str:
    """BENCH_COMMIT, for a copy of a checkout; else that of the checkout, with "+" for changes."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    if "BENCH_COMMIT" in os.environ:
        return os.environ["BENCH_COMMIT"]
    head = git("rev-parse", "HEAD")
    if not head:
        return "unknown"
    return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def environment(script: str) -> Record:
    """Which script, commit, date and time (UTC), device, how many are visible, and versions."""
    import torch

    from torchtitan_lc.tools.hardware import allocator_settings, device_name, device_type, versions

    kind = device_type()
    now = time.gmtime()
    return {
        "script": script,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", now),
        "time": time.strftime("%H:%M:%S", now),
        "device": device_name(kind),
        "devices": torch.cuda.device_count() if kind == "cuda" else 1,
        "allocator": allocator_settings(),
        "versions": versions(),
    }


def parser_beside_a_job(description: str | None) -> argparse.ArgumentParser:
    """For a script whose other arguments go to a job: none of those is taken for one of its own cut short."""
    return argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def write(name: str, result: Record, folder: Path = RESULTS, table: str = "") -> Path:
    """NAME.json, and NAME.md where there is a table."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"name": name, **result}, indent=1) + "\n")
    if table:
        (folder / f"{name}.md").write_text(table)
    return path


def read(path: Path) -> Record:
    record: Record = json.loads(path.read_text())
    return record


def without_paths(text: str, folder: str) -> str:
    """Results say nothing of the machine's folders."""
    return text.replace(folder, "DUMP_FOLDER").replace(f"{ROOT}/", "")


def why(error: Exception) -> str:
    """One line on why a case failed: a result, too."""
    text = " ".join(str(error).replace(f"{ROOT}/", "").split())
    return f"{type(error).__name__}: {text}"[:300]


# -- tables


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def shown(values: dict[str, float] | None, digits: int = 3) -> str:
    """A spread as "median (least to most)"; empty where there is none."""
    if values is None:
        return ""
    least, most = f"{values['min']:.{digits}f}", f"{values['max']:.{digits}f}"
    return f"{values['median']:.{digits}f} ({least} to {most})"


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def tokens(count: int) -> str:
    """131072 -> "128K", as lengths are written everywhere."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if count % unit == 0:
            return f"{count // unit}{letter}"
    return str(count)
