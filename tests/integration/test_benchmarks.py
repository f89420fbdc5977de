"""The benchmark scripts run, and record what they must: tried at sizes that measure nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_bench_block_records_every_case_and_the_failed_ones_too(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "benchmarks/bench_block.py", "--name", "tiny", "--out", str(tmp_path)),
        *("--flavor", "debugmodel", "--seq_len", "256", "--ranks", "4", "--steps", "1"),
        *("--dtype", "float32", "--kernel", "stand-in", "--modes", "selective"),
        *("--strategies", "upipe:1", "ulysses", "local"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BENCH_COMMIT": "none"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "tiny.json").read_text())
    assert {"commit", "date", "device", "versions", "seq_len", "ranks", "peers"} <= set(record)
    upipe, ulysses, local = record["cases"]
    assert upipe["seconds"]["median"] > 0 and ulysses["strategy"] == "ulysses"
    assert "4 ranks" in local["error"], "a case that cannot run is a result"
