"""Parameters and optimizer state on the host change no bit: losses, norms, weights, moments, resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from tests.helpers import run_distributed
from tests.tiny import register_tiny, tiny_config
from torchtitan_lc.components.metrics import MetricsProcessor
from torchtitan_lc.components.offloaded_adam import OffloadedAdam
from torchtitan_lc.trainer import StepResult, Trainer

OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "state": {"optimizer.offload_state": True},
    "all": {"training.enable_cpu_offload": True},
    "both": {"training.enable_cpu_offload": True, "optimizer.offload_state": True},
}
SETTINGS: dict[str, Any] = {
    "training.global_batch_size": 4,  # several micro-batches
    "training.max_norm": 0.5,  # it bites: norms lie above 1
    "optimizer.lr": 1e-2,
    "optimizer.weight_decay": 0.1,
    "lr_scheduler.warmup_steps": 2,
    "lr_scheduler.total_steps": 6,
    "lr_scheduler.min_lr_factor": 0.1,
    "checkpoint.interval": 2,
}


def train(folder: str, steps: int, device: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train the real Trainer to ``steps``; what it ends with, whole, and each step's loss and norm."""
    chosen = {**SETTINGS, "job.dump_folder": folder, "training.steps": steps, **settings}
    trainer = Trainer(tiny_config(chosen), torch.device(device))
    seen: list[tuple[float, float]] = []
    step = trainer.train_step

    def watched(metrics: MetricsProcessor) -> StepResult:
        result = step(metrics)
        seen.append((result.loss_sum.item(), result.grad_norm.item()))
        return result

    trainer.train_step = watched  # type: ignore[method-assign]
    try:
        trainer.train()
    finally:
        trainer.close()
    optimizer = trainer.optimizer
    assert isinstance(optimizer, OffloadedAdam) == ("optimizer.offload_state" in settings)
    end: dict[str, Tensor] = {}
    for name, parameter in trainer.module.named_parameters():
        end[name] = _whole(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            end[f"{name}/{key}"] = _whole(value)
    return {"seen": seen, "end": end}


def _whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu().clone()


def assert_same(a: dict[str, Any], b: dict[str, Any], what: object, last: int = 0) -> None:
    """``last``: only so many steps of a were run in b, the last ones."""
    assert a["seen"][-last:] == b["seen"] and len(b["seen"]) > 0, what
    assert a["end"].keys() == b["end"].keys(), what
    for name, value in a["end"].items():
        assert torch.equal(value, b["end"][name]), (what, name)


def _same_with_and_without(rank: int, world_size: int, tmp: str) -> None:
    register_tiny()
    spreads: list[dict[str, Any]] = [{}, {"parallelism.context_parallel_degree": world_size}]
    replicas = {"parallelism.data_parallel_replicate_degree": 2, "model.flavor": "tied"}
    rules: list[dict[str, Any]] = [
        {"optimizer.name": "AdamW"},
        {"optimizer.name": "Adam", "optimizer.implementation": "foreach", **replicas},
        {"optimizer.name": "SGD"},
    ]
    for rule in rules:
        offloads = ("all",) if rule["optimizer.name"] == "SGD" else ("state", "all", "both")
        for spread in spreads[: 2 if rule["optimizer.name"] == "AdamW" else 1]:
            plain = train(tmp, 3, "cpu", {**rule, **spread})
            for offload in offloads:
                got = train(tmp, 3, "cpu", {**rule, **spread, **OFFLOADS[offload]})
                assert_same(plain, got, (rule, spread, offload))


def test_losses_norms_weights_and_moments_are_those_without_offload(tmp_path: Path) -> None:
    run_distributed(_same_with_and_without, 2, str(tmp_path), timeout=200)


def _saved_and_resumed(rank: int, world_size: int, tmp: str, async_mode: str) -> None:
    register_tiny()
    base = {"optimizer.name": "AdamW", "parallelism.context_parallel_degree": world_size}
    saving = {**base, "checkpoint.enable": True, "checkpoint.async_mode": async_mode}
    straight = train(f"{tmp}/straight", 6, "cpu", base)
    mixed = (("none", "state"), ("state", "all"))
    same = (("state", "state"), ("all", "all"))
    for saved, loaded in mixed if async_mode == "disabled" else same:
        folder = f"{tmp}/{saved}-{loaded}"
        train(folder, 3, "cpu", {**saving, **OFFLOADS[saved]})
        resumed = train(folder, 6, "cpu", {**saving, **OFFLOADS[loaded]})
        assert_same(straight, resumed, (saved, loaded), last=3)


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_resume_equals_a_straight_run_whatever_the_two_halves_offload(
    tmp_path: Path, async_mode: str
) -> None:
    run_distributed(_saved_and_resumed, 2, str(tmp_path), async_mode, timeout=200)


def _policies(rank: int, world_size: int, tmp: str) -> list[list[str]]:
    register_tiny()
    found = []
    for offload in ("none", "all"):
        policies: list[str] = []
        real = torch_fsdp.fully_shard

        def watched(*args: Any, real: Any = real, policies: Any = policies, **kwargs: Any) -> Any:
            policy = kwargs["offload_policy"]
            pinned = isinstance(policy, CPUOffloadPolicy) and policy.pin_memory
            policies.append(type(policy).__name__ + (" pinned" if pinned else ""))
            return real(*args, **kwargs)

        torch_fsdp.fully_shard = watched
        try:
            train(tmp, 1, "cpu", OFFLOADS[offload])
        finally:
            torch_fsdp.fully_shard = real
        found.append(policies)
    return found


def test_every_unit_gets_the_offload_policy_unpinned_on_a_cpu(tmp_path: Path) -> None:
    plain, offloaded = run_distributed(_policies, 1, str(tmp_path))[0]
    # Two blocks, embedding, head and root.
    assert plain == ["OffloadPolicy"] * 5
    assert offloaded == ["CPUOffloadPolicy"] * 5
