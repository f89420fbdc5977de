"""bench_load.py: peaks of the resident set, the made-up folder, and the bound."""

from __future__ import annotations

import json
import mmap
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_load
from benchmarks.bench_load import JOB, PeakResident, in_gib, judged, make_folder, resident, table
from tests.hf_folders import read_weights
from torchtitan_lc.components import hf_export
from torchtitan_lc.components.hf_folder import INDEX, misfit
from torchtitan_lc.config.manager import load_config
from torchtitan_lc.models.llama3 import FLAVORS

MIB = 2**20
SEEN = 0.1  # seconds in which samples are sure to see what is there


def most_with(anon: int, mapped: Path | None = None) -> tuple[PeakResident, dict[str, int]]:
    """The peaks around so many bytes of memory, or a file read through a map, all of it given back."""
    before = resident()
    with PeakResident() as peak:
        if mapped is not None:
            with (
                mapped.open("rb") as file,
                mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages,
            ):
                assert sum(pages[:: mmap.PAGESIZE]) == 0
                time.sleep(SEEN)
        written = torch.ones(anon, dtype=torch.uint8)
        time.sleep(SEEN)
        del written
    return peak, {key: most - before[key] for key, most in peak.most.items()}


def test_memory_that_was_given_back_counts_as_anonymous() -> None:
    peak, rise = most_with(256 * MIB)
    assert peak.exact
    assert 250 * MIB < rise["anon"] < 320 * MIB and 250 * MIB < rise["rss"] < 320 * MIB
    assert rise["file"] < 30 * MIB
    _, later = most_with(MIB)
    assert later["rss"] < 100 * MIB, "the mark of the first time was reset"


def test_pages_of_a_mapped_file_count_as_such(tmp_path: Path) -> None:
    (tmp_path / "zeros").write_bytes(bytes(64 * MIB))
    _, rise = most_with(MIB, tmp_path / "zeros")
    assert rise["file"] > 60 * MIB and rise["rss"] > 60 * MIB and rise["anon"] < 30 * MIB


def test_without_the_right_to_reset_the_mark_samples_have_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most_with(256 * MIB)

    def refused(path: Path, text: str) -> int:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "write_text", refused)
    peak, rise = most_with(64 * MIB)
    assert not peak.exact and 60 * MIB < rise["rss"] < 120 * MIB


def test_the_folder_is_one_of_the_model_in_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_export, "_MAX_FILE_BYTES", 500_000)
    folder = tmp_path / "hf"
    make_folder(folder, load_config([*JOB, "--model.flavor=debugmodel"], quiet=True))
    tensors = read_weights(folder)
    assert misfit(folder, {name: tuple(tensor.shape) for name, tensor in tensors.items()}) is None
    args = FLAVORS["debugmodel"]
    assert tensors["lm_head.weight"].shape == (args.vocab_size, args.dim)
    assert len(tensors) == 3 + 9 * args.n_layers
    assert len(set(json.loads((folder / INDEX).read_text())["weight_map"].values())) > 3
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == args.dim
    for tensor in tensors.values():
        assert tensor.dtype == torch.bfloat16 and -1 <= tensor.min() < 0 < tensor.max() <= 1
    query, output = (tensors[f"model.layers.0.self_attn.{x}_proj.weight"] for x in ("q", "o"))
    assert not query.equal(output)


def test_a_folder_of_something_else_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    argv = ["", "--name", "x", "--model.flavor=debugmodel", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match="holds no weights"):
        bench_load.main()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_all_of_the_peak_has_to_be_within_shards_one_tensor_and_a_gib() -> None:
    gib = bench_load.GIB
    rank: dict[str, Any] = {
        "rank": 0,
        "share": 7 * gib,
        "tensor": gib,
        "start": gib // 2,
        "before": 7 * gib,
    }
    rank |= {"peak_anon": 8 * gib, "peak_file": gib, "peak_is_exact": True, "load_seconds": 60.0}
    within, above = (in_gib(judged({**rank, "peak": 9 * gib + more})) for more in (0, 1))
    assert within["extra_gib"] == 1.5 and within["bound_gib"] == 9
    assert within["within"] and not above["within"]
    rows = table([{"name": "x", "ranks": [within, above]}]).splitlines()[2:]
    cells = ["`x`", "0", "7.00", "1.00", "0.50", "7.00", "9.00", "8.00", "1.00", "1.50", "9.00"]
    assert rows[0] == "| " + " | ".join([*cells, "yes", "60"]) + " |"
    assert rows[1].endswith("| no | 60 |")
