"""Which parameters decay, and which torch optimizer a config means."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan_lc.components.optimizer import build_optimizer
from torchtitan_lc.config.job_config import JobConfig, Optimizer, Training
from torchtitan_lc.memory.placement import host_state


class SmallModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.projection = nn.Linear(4, 4)
        self.norm = nn.RMSNorm(4)


def changed(**fields: Any) -> Optimizer:
    return dataclasses.replace(Optimizer(), **fields)


def step_without_gradient(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """One step with zero gradients: all that moves is what decays."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_weight_decay_moves_matrices_and_the_embedding_but_no_norm_or_bias(name: str) -> None:
    model = SmallModel()
    before = {k: v.detach().clone() for k, v in model.named_parameters()}
    config = changed(name=name, lr=0.1, weight_decay=0.5)
    step_without_gradient(build_optimizer(model.named_parameters(), config), model)
    moved = {k for k, v in model.named_parameters() if not torch.equal(v, before[k])}
    assert moved == {"embedding.weight", "projection.weight"}


def test_adamw_takes_lr_times_weight_decay_off_a_matrix() -> None:
    model = SmallModel()
    before = model.projection.weight.detach().clone()
    config = changed(name="AdamW", lr=0.1, weight_decay=0.5)
    step_without_gradient(build_optimizer(model.named_parameters(), config), model)
    torch.testing.assert_close(model.projection.weight, before * 0.95)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop", "auto"])
def test_every_implementation_takes_the_same_step(implementation: str) -> None:
    def trained(implementation: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = SmallModel()
        config = changed(lr=0.1, implementation=implementation)
        optimizer = build_optimizer(model.named_parameters(), config)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        return [p.detach() for p in model.parameters()]

    for ours, reference in zip(trained(implementation), trained("for-loop"), strict=True):
        torch.testing.assert_close(ours, reference)


@pytest.mark.parametrize(
    ("name", "device", "fused"),
    [
        ("AdamW", "cpu", True),
        ("Adam", "cpu", True),
        ("SGD", "cpu", False),
        ("AdamW", "meta", False),
    ],
)
def test_auto_goes_by_the_device_of_the_parameters_and_is_fused_where_it_can(
    name: str, device: str, fused: bool
) -> None:
    model = SmallModel().to(device)
    optimizer = build_optimizer(model.named_parameters(), changed(name=name))
    for group in optimizer.param_groups:
        assert (group["fused"], group["foreach"]) == (fused, not fused)


def test_config_values_reach_both_groups() -> None:
    config = changed(lr=0.25, beta1=0.8, beta2=0.9, eps=1e-4)
    optimizer = build_optimizer(SmallModel().named_parameters(), config)
    assert len(optimizer.param_groups) == 2
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.25, (0.8, 0.9), 1e-4)


def test_frozen_parameters_are_left_out_and_no_group_is_empty() -> None:
    model = SmallModel()
    model.norm.weight.requires_grad_(False)
    model.projection.bias.requires_grad_(False)
    optimizer = build_optimizer(model.named_parameters(), Optimizer())
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]


def test_a_model_without_trainable_parameters_is_refused() -> None:
    model = SmallModel().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to optimize"):
        build_optimizer(model.named_parameters(), Optimizer())


@pytest.mark.parametrize("field", ["name", "implementation"])
def test_an_unknown_word_is_refused_with_the_known_ones(field: str) -> None:
    config = changed(**{field: "Lion"})
    with pytest.raises(ValueError, match=f"optimizer.{field} = 'Lion': use "):
        build_optimizer(SmallModel().named_parameters(), config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
@pytest.mark.parametrize("where", ["device", "offload_state", "enable_cpu_offload"])
def test_host_memory_is_set_aside_for_state_that_lies_there(
    name: str, where: str, dtype: torch.dtype
) -> None:
    optimizer_config = changed(name=name, offload_state=where == "offload_state")
    training = Training(enable_cpu_offload=where == "enable_cpu_offload")
    model = nn.Linear(64, 64).to(dtype)
    optimizer = build_optimizer(model.named_parameters(), optimizer_config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    held = sum(
        value.nbytes
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    )
    config = JobConfig(optimizer=optimizer_config, training=training)
    parameters = sum(p.nbytes for p in model.parameters())
    # FSDP2 page-locks shards and gradients beside it, rounded up to at most twice their size.
    beside = {"device": -held, "offload_state": 0, "enable_cpu_offload": 4 * parameters}
    assert host_state(config, parameters) == held + beside[where]
