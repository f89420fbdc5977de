"""Numbers that concern all ranks: losses, counts, the gradient norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def sum_over_ranks(value: Tensor) -> Tensor:
    """Sum over all ranks of the job. A DTensor is reduced like the plain tensor that it stands for."""
    return _reduce(value, dist.ReduceOp.SUM)


def max_over_ranks(value: Tensor) -> Tensor:
    return _reduce(value, dist.ReduceOp.MAX)


def _reduce(value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    if isinstance(value, DTensor):
        # Each rank's own share: reducing full_tensor() would count it once per rank.
        value = value.to_local()
    value = value.detach().clone()
    dist.all_reduce(value, op=op)
    return value


def global_grad_norm(parameters: Iterable[torch.nn.Parameter]) -> Tensor:
    """Euclidean norm (a plain scalar, the same on all ranks) of the whole, unsharded gradient.

    Parameters may live on different meshes, or be plain tensors that every rank holds whole: norms
    are taken mesh by mesh and then combined, so that no replica counts twice.
    """
    by_mesh: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad = parameter.grad
            mesh = grad.device_mesh if isinstance(grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(grad)
    norms = []
    for grads in by_mesh.values():
        norm = get_total_norm(grads)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack(norms))


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients so that their global norm is at most ``max_norm`` (0: measure only); returns
    the norm before clipping."""
    parameters = list(parameters)
    norm = global_grad_norm(parameters)
    if max_norm > 0:
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
