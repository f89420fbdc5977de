"""FSDP2 over a model's units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# torch's FSDP is imported where it is used: it takes a second, and a plan needs only models.


def shard_units(
    model: nn.Module,
    units: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool | Sequence[bool],
    cpu_offload: bool = False,
) -> None:
    """Shard each of ``units``, then what is left of ``model`` as the root unit, over ``mesh``.

    Weights are gathered in ``param_dtype``, gradients summed over ranks in ``reduce_dtype``; the shards
    keep the dtype they have. Forward inputs are not cast: blocks get hidden states that already have
    param_dtype, and rope's cosines and sines, which must keep theirs.

    cpu_offload: shards and their gradients live in host memory (page-locked where the mesh is one of
    GPUs); a unit's shards go to the device when it is gathered. Materialise the model on the CPU then.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    offload = OffloadPolicy()
    if cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    if isinstance(reshard_after_forward, bool):
        reshard_after_forward = [reshard_after_forward] * len(units)
    for unit, reshard in zip(units, reshard_after_forward, strict=True):
        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=reshard,
        )
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    sum_gradients(model.modules())


def sum_gradients(modules: Iterable[nn.Module]) -> None:
    """Switch FSDP's mean off: gradients are summed over ranks.

    The loss is already divided by the number of live labels of all ranks, the only place where a
    division happens. A factor of 1 alone asks gloo for a reduction that it lacks; forcing SUM gives the
    same on every backend.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in modules:
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
