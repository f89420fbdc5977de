"""When memory that torch's allocator holds without using it goes back to the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.offloaded import LAYERS, build, loss_of
from torchtitan_lc import trainer
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.dry_run.compare import NAME
from torchtitan_lc.launch import main
from torchtitan_lc.memory import activations
from torchtitan_lc.memory.placement import releases_cached
from torchtitan_lc.models.llama3 import FLAVORS

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


@pytest.mark.parametrize("rows", [1, 3])
def test_before_a_step_and_in_each_backward(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    head_and_blocks = 1 + FLAVORS["debugmodel"].n_layers
    assert len(calls) == 1 + rows * head_and_blocks


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_the_head_is_done_by_then_or_the_mlp_of_a_block_and_its_attention_has_not_begun(
    mode: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "releases_memory", lambda *_: True)
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("released"))
    keys = ("activation_checkpoint.mode", "activation_checkpoint.block_inputs_every")
    model, _ = build(dict(zip(keys, (mode, every), strict=True)))
    last: dict[str, str] = {
        "head.output.weight": "head",
        "feed_forward.w2.weight": "mlp",
        "attention.wo.weight": "attention",
        "tok_embeddings.weight": "embedding",
    }
    for name, parameter in model.named_parameters():
        for end, part in last.items():
            if name.endswith(end):
                parameter.register_post_accumulate_grad_hook(lambda _, p=part: order.append(p))
    hooks: list[torch.Tensor] = []
    register = torch.Tensor.register_hook

    def registered(x: torch.Tensor, hook: Any) -> Any:
        hooks.append(x)
        return register(x, hook)

    monkeypatch.setattr(torch.Tensor, "register_hook", registered)
    loss_of(model).backward()
    assert len(hooks) == 1 + LAYERS, "none in recomputations"
    block = ["mlp", "released", "attention"]
    assert order == ["head", "released", *block * LAYERS, "embedding"]
