"""The optimizer: two parameter groups, so that weight decay falls on matrices only.

    ndim >= 2   decays by optimizer.weight_decay   projections, MLP, embedding, output head
    ndim <= 1   never decays                       norm scales, biases

Embedding and output head are matrices and do decay, as in TorchTitan and in the Hugging Face
trainer's default; leaving them out would be a silent third group that no config key names. A norm
scale pulled towards zero only fights the layer that follows it.

Works on plain tensors and on FSDP2's DTensors alike: ``ndim`` of a DTensor is that of the whole
parameter, so a sharded matrix is a matrix on every rank. Parameter order inside a group is that of
``named_parameters``, which is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchtitan_lc.components.offloaded_adam import OffloadedAdam

if TYPE_CHECKING:
    from torchtitan_lc.config.job_config import Optimizer as OptimizerConfig


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], optimizer_config: OptimizerConfig
) -> torch.optim.Optimizer:
    """AdamW, Adam or SGD over the parameters that require a gradient.

    ``implementation = "auto"`` is fused (one pass over memory) for AdamW and Adam on a GPU or a CPU,
    and foreach for SGD and elsewhere. SGD is the plain rule, without momentum; it reads neither the
    betas nor eps. AdamW decouples the decay from the gradient, Adam and SGD add it to the gradient
    (L2). With ``offload_state`` the moments of AdamW and Adam live in host memory.

    Build it after the model is sharded and materialised: the optimizer holds the parameter objects
    themselves, on the device on which it will step.

    Raises ValueError for an unknown name or implementation, or when nothing requires a gradient, and
    UserError where the host memory of ``offload_state`` can't be had.
    """
    config = optimizer_config
    groups = _decay_groups(named_parameters, config.weight_decay)
    device = groups[0]["params"][0].device
    settings: dict[str, Any] = {
        "lr": config.lr,
        **_implementation(config.name, config.implementation, device.type),
    }
    if config.name == "SGD":
        return torch.optim.SGD(groups, **settings)
    if config.name not in ("AdamW", "Adam"):
        raise ValueError(f"optimizer.name = {config.name!r}: use AdamW, Adam or SGD")
    settings |= {"betas": (config.beta1, config.beta2), "eps": config.eps}
    if config.offload_state:
        return OffloadedAdam(groups, **settings, decoupled_weight_decay=config.name == "AdamW")
    cls = torch.optim.AdamW if config.name == "AdamW" else torch.optim.Adam
    return cls(groups, **settings)


def _decay_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for _, parameter in named_parameters:
        if parameter.requires_grad:
            (matrices if parameter.ndim >= 2 else others).append(parameter)
    if not matrices and not others:
        raise ValueError("no parameter requires a gradient: there is nothing to optimize")
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    # The checkpoint code of torch cannot name a group without parameters.
    return [group for group in groups if group["params"]]


def _implementation(name: str, implementation: str, device_type: str) -> dict[str, bool]:
    if implementation == "auto":
        # torch 2.11 cannot run the fused SGD on sharded parameters.
        has_fused = device_type in ("cuda", "cpu") and name != "SGD"
        implementation = "fused" if has_fused else "foreach"
    if implementation not in ("fused", "foreach", "for-loop"):
        raise ValueError(
            f"optimizer.implementation = {implementation!r}: use auto, fused, foreach or for-loop"
        )
    return {"fused": implementation == "fused", "foreach": implementation == "foreach"}
