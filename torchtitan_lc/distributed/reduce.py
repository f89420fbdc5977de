"""Numbers that concern all ranks: losses, counts, the gradient norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

# torch's DTensor is imported where it is used: it takes half a second, and a plan has no use for it.


def sum_over_ranks(value: Tensor) -> Tensor:
    """Sum over all ranks of the job. A DTensor is reduced like the plain tensor that it stands for."""
    return _reduce(value, dist.ReduceOp.SUM)


def max_over_ranks(value: Tensor) -> Tensor:
    return _reduce(value, dist.ReduceOp.MAX)


def _reduce(value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        # Each rank's own share: reducing full_tensor() would count it once per rank.
        value = value.to_local()
    value = value.detach().clone()
    dist.all_reduce(value, op=op)
    return value


def global_grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Euclidean norm (a plain scalar, the same on all ranks) of the whole, unsharded gradient.

    Parameters may live on different meshes, or be plain tensors that every rank holds whole: norms
    are taken mesh by mesh and then combined, so that no replica counts twice.
    """
    from torch.distributed.tensor import DTensor

    norms = []
    for group in _by_mesh(parameters):
        norm = get_total_norm([p.grad for p in group if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack(norms))


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients so that their global norm is at most ``max_norm`` (0: measure only); returns
    the norm before clipping."""
    parameters = list(parameters)
    norm = global_grad_norm(parameters)
    if max_norm > 0:
        for group in _by_mesh(parameters):
            clip_grads_with_norm_(group, max_norm, norm)
    return norm


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that have a gradient, by the mesh that it lies on; torch's functions take no mixture."""
    from torch.distributed.tensor import DTensor

    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad = parameter.grad
            mesh = grad.device_mesh if isinstance(grad, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())
