"""The history of a GPU's allocations, recorded while blocks are recomputed."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from tests.offloaded import build, loss_of
from torchtitan_lc.attention.kernels import Math
from torchtitan_lc.config.job_config import Profiling
from torchtitan_lc.tools.profiling import memory_snapshots

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_a_memory_snapshot_does_not_end_the_run(mode: str, tmp_path: Path) -> None:
    """Recomputation ends by an exception, and tensors are freed while it passes."""
    model, _ = build({"activation_checkpoint.mode": mode}, kernel=Math(), device="cuda")
    config = Profiling(enable_memory_snapshot=True, profile_freq=1)
    with memory_snapshots(config, str(tmp_path), 0, 1, "cuda") as step_done:
        for seed in range(3):
            loss_of(model, seed).backward()
        step_done()
    (file,) = tmp_path.rglob("*.pickle")
    (events, *_) = pickle.loads(file.read_bytes())["device_traces"]
    allocated = [event for event in events if event["action"] == "alloc"]
    assert any("tiled" in frame["filename"] for event in allocated for frame in event["frames"])
