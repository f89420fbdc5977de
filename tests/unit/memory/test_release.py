"""When memory that torch's allocator holds without using it goes back to the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.offloaded import build, loss_of
from torchtitan_lc import trainer
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.dry_run.compare import NAME
from torchtitan_lc.launch import main
from torchtitan_lc.memory import activations
from torchtitan_lc.memory.placement import releases_cached

GIB = 2**30


@pytest.mark.parametrize(
    ("value", "buffer_gib", "released"),
    [("auto", 1.0, False), ("auto", 1.5, True), (True, 0.1, True), (False, 9.0, False)],
)
def test_auto_is_for_rows_whose_buffers_take_more_than_a_64th_of_the_gpu(
    value: bool | str, buffer_gib: float, released: bool
) -> None:
    config = JobConfig()
    config.training.release_cached_memory = value  # type: ignore[assignment]
    assert releases_cached(config, int(buffer_gib * GIB), 80 * GIB) is released


def test_a_cpu_has_nothing_to_give_back() -> None:
    config = JobConfig()
    config.training.release_cached_memory = True
    assert not activations.releases_memory(config, 9 * GIB, torch.device("cpu"))


@pytest.mark.parametrize(("rows", "times"), [(1, 2), (3, 4)])
def test_before_a_step_and_after_each_backward_of_the_head(
    rows: int, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (trainer, activations):
        monkeypatch.setattr(module, "releases_memory", lambda *_: True)
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    words = ["--config", "debug.toml", "--training.seq_len=512", "--dry_run"]
    words += ["--plan.hardware=h100_80gb", "--plan.gpus_per_node=2"]
    words += ["--parallelism.context_parallel_degree=2", f"--training.global_batch_size={rows}"]
    assert main(["--nproc_per_node", "1", "--", *words, f"--job.dump_folder={tmp_path}"]) == 0
    assert json.loads((tmp_path / NAME).read_text())["steps"] == 2, "one whole step on a CPU"
    assert len(calls) == times


def test_the_head_is_done_by_then_and_no_block_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "releases_memory", lambda *_: True)
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("released"))
    model, _ = build({"activation_checkpoint.mode": "selective"})
    for name, parameter in model.named_parameters():
        part = "block" if name.startswith("layers") else name.partition(".")[0]
        parameter.register_post_accumulate_grad_hook(lambda _, part=part: order.append(part))
    loss_of(model).backward()
    place = order.index("released")
    assert order.count("released") == 1
    assert set(order[:place]) == {"head"} and "head" not in order[place:]
