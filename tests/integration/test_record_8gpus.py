"""The script of the record steps runs real jobs: two CPU ranks stand for the GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TINY = (
    *("--ranks", "2", "--flavor", "debugmodel", "--hardware", "cpu", "--mib", "2"),
    *("--lengths", "256", "--cut_lengths", "512", "--equal_length", "256"),
    *("--kernel", "cpu", "--published_kernel", "cpu", "--training.mixed_precision_param=float32"),
    "--compile.backend=eager",
)
PARTS = ("exchange", "published_256", "long_upipe_512", "long_ulysses_512")


def _visit(folder: Path, *words: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BENCH_COMMIT": "none"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.record_8gpus", "--name", "tiny"]
    done = subprocess.run(
        [*command, "--out", str(folder), *TINY, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "tiny.md").read_text().startswith("All layers")
    record: dict[str, Any] = json.loads((folder / "tiny.json").read_text())
    return record


def test_a_visit_runs_jobs_through_the_launcher_and_the_next_one_leaves_them_alone(
    tmp_path: Path,
) -> None:
    first = _visit(tmp_path, "--parts", *PARTS)["parts"]
    for name in PARTS:
        assert "failed" not in first[name], first[name]
    upipe, ulysses, whole = (first[name] for name in (*PARTS[2:], PARTS[1]))
    assert 'flavor = "debugmodel-2"' in upipe["config"] and 'name = "llama3_cut"' in upipe["config"]
    assert "1,208,640 parameters" in " ".join(whole["log"]), "all three layers"
    assert "1,208,640 parameters" not in " ".join(upipe["log"])
    assert len(upipe["steps"]) == 1 and len(whole["steps"]) == 3
    assert abs(upipe["steps"][0]["loss"] - ulysses["steps"][0]["loss"]) < 1e-5
    assert upipe["memory"]["host_gib"] > 0 and whole["tps"]["median"] > 0
    assert upipe["plan"]["allocated_gib"] > 0 and upipe["plan"]["seconds"] > 0
    assert first["exchange"]["all_to_all"][0]["gbps"]["median"] > 0
    assert first["lean_256"]["failed"] == "not tried yet"
    again = _visit(tmp_path, "--parts", *PARTS)
    assert len(again["visits"]) == 2
    assert {name: again["parts"][name] for name in PARTS} == {name: first[name] for name in PARTS}


def test_a_part_that_fails_is_recorded_with_what_it_said_and_the_next_one_runs(
    tmp_path: Path,
) -> None:
    parts = ("exchange", "long_upipe_512")
    found = _visit(tmp_path, "--parts", *parts, "--attention.kernel=fa4")["parts"]
    assert "failed" not in found["exchange"]
    assert found["long_upipe_512"]["exit_code"] == 2
    assert "needs a CUDA device" in " ".join(found["long_upipe_512"]["log"])
    assert found["long_upipe_512"]["failed"].startswith("exit code 2: ")
