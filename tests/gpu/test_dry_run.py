"""A dry run on a GPU: the allocator's own figures, and a limit that stands for a smaller GPU."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_lc.dry_run.compare import NAME
from torchtitan_lc.launch import main

pytestmark = pytest.mark.gpu

JOB = (
    *("--model.flavor", "1B", "--training.seq_len", "256K", "--plan.hardware", "h200_141gb"),
    *("--parallelism.context_parallel_degree", "8", "--activation_offload.enable"),
)


def launch(folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    words = [*JOB, "--dry_run", "--job.dump_folder", str(folder), *flags]
    code = main(["--nproc_per_node", "1", "--", *words])
    return code, json.loads((folder / NAME).read_text())


@pytest.mark.parametrize("kernel", ["job", "stand_in"])
def test_what_the_allocator_says_is_what_was_planned(kernel: str, tmp_path: Path) -> None:
    gc.collect()
    there = torch.cuda.memory_allocated()  # of tests before, and cuBLAS's workspace
    code, found = launch(tmp_path, "--dry_run.kernel", kernel, "--dry_run.memory_limit_gib", "70")
    assert code == 0 and found["tensors"] == "real"
    figures = found["figures"]
    assert -1 <= figures["peak allocated"]["plan_off_by_percent"] <= 3
    built = figures["allocated after building"]
    assert built["measured"] - there == pytest.approx(built["planned"], rel=0.01)
    reserved = figures["peak reserved"]["measured"]
    assert figures["peak allocated"]["measured"] <= reserved <= found["limit"]
    assert figures["host: offloaded activations"]["plan_off_by_percent"] == pytest.approx(0, abs=1)


def test_a_limit_below_the_peak_is_out_of_memory_somewhere_in_a_step(tmp_path: Path) -> None:
    _, free = launch(tmp_path / "free")
    peak = free["figures"]["peak allocated"]["measured"] / 2**30
    code, found = launch(tmp_path / "tight", "--dry_run.memory_limit_gib", str(0.8 * peak + 1.5))
    assert code == 3 and found["ran_out_of_memory"]
    assert found["at"].startswith("step ") and "out of memory" in found["error"]
    _, again = launch(tmp_path / "again")
    assert again["fits"], "the limit is gone with the run"
