"""bench_load.py makes a folder, has ranks load it, and records what memory that took."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_load
from benchmarks.bench_load import GIB
from torchtitan_lc.components.hf_folder import has_weights
from torchtitan_lc.config.manager import load_config
from torchtitan_lc.preflight import job_model, parameter_shapes

TINY = "--model.flavor=debugmodel"


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    argv = ["", "--name", "tiny", "--out", str(folder), "--limit", "120", TINY, *words]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    bench_load.main()
    found: dict[str, Any] = json.loads((folder / "tiny.json").read_text())
    return found


def test_each_rank_loads_its_shards_and_says_what_that_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hf"
    found = run(tmp_path, monkeypatch, "--folder", str(folder))
    assert found["script"] == "bench_load" and has_weights(folder), "a named folder is kept"
    shapes = parameter_shapes(job_model(load_config([TINY], quiet=True))).values()
    sizes = [shape[0] * (shape[1] if len(shape) == 2 else 1) * 2 for shape in shapes]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert sum(rank["share_gib"] for rank in found["ranks"]) * GIB == sum(sizes)
    for rank in found["ranks"]:
        assert rank["tensor_gib"] * GIB == max(sizes)
        assert rank["bound_gib"] == rank["share_gib"] + rank["tensor_gib"] + 1
        assert 0 < rank["start_gib"] < rank["before_gib"] <= rank["peak_gib"]
        assert max(rank["peak_anon_gib"], rank["peak_file_gib"]) < rank["peak_gib"]
        assert rank["within"] and rank["peak_is_exact"] and rank["load_seconds"] > 0
    assert 0 < found["folder"]["gib"] - sum(sizes) / GIB < 1e-4, "a header more"
    assert 'dtype = "bfloat16"' in found["config"] and str(tmp_path) not in found["config"]
    assert (tmp_path / "tiny.md").read_text().count("| `tiny` |") == 2


def test_a_load_that_leaves_values_out_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="a rank failed"):
        run(tmp_path, monkeypatch, "--ranks", "1", "--checkpoint.exclude_from_loading=model")
    assert "the load has left values out" in capfd.readouterr().err
    assert not (tmp_path / "tiny.json").exists()
