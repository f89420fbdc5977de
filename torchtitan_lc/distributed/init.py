"""Initial weights that depend on the seed, the parameter's name and nothing else.

A value is a hash of (seed, name, index in the whole parameter), so each rank makes exactly its own
shard: the same model on 1, 8 or 512 ranks, on a CPU or a GPU, with no broadcast, no rank that holds a
whole parameter and no generator state to keep in step.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_CHUNK = (
    1 << 24
)  # elements hashed at once: bounds the int64 and fp64 temporaries to a few hundred MB
_CUTOFF = 3.0  # standard deviations


@torch.no_grad()
def normal_(parameter: Tensor, name: str, *, seed: int, std: float) -> None:
    """Fill ``parameter`` (a tensor or DTensor) from a normal distribution cut off at 3 ``std``."""
    local, shape, offsets = _local_part(parameter)
    key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    salt = int.from_bytes(key, "little", signed=True)
    flat = torch.empty(local.numel(), dtype=local.dtype, device=local.device)
    for start in range(0, flat.numel(), _CHUNK):
        stop = min(start + _CHUNK, flat.numel())
        index = torch.arange(start, stop, dtype=torch.int64, device=local.device)
        flat[start:stop] = _normal(_global_index(index, local.shape, shape, offsets), salt) * std
    local.copy_(flat.view(local.shape))


def _local_part(parameter: Tensor) -> tuple[Tensor, torch.Size, tuple[int, ...]]:
    """This rank's tensor, the whole parameter's shape, and where the one lies in the other."""
    # Not at the top: half a second, and a plan has no use for it.
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if isinstance(parameter, DTensor):
        _, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        return parameter.to_local(), parameter.shape, tuple(offsets)
    return parameter, parameter.shape, (0,) * parameter.dim()


def _global_index(
    index: Tensor, local: torch.Size, shape: torch.Size, offsets: tuple[int, ...]
) -> Tensor:
    """Flat indices into the local part -> flat indices into the whole parameter."""
    result = torch.zeros_like(index)
    stride = 1
    for size, whole, offset in zip(
        reversed(local), reversed(shape), reversed(offsets), strict=True
    ):
        result += (index % size + offset) * stride
        index = index // size
        stride *= whole
    return result


def _normal(index: Tensor, salt: int) -> Tensor:
    """Standard normal numbers within the cutoff, fp64, one per index."""
    unit = (_shift(_mix(index, salt), 11).double() + 0.5) * 2.0**-53  # in (0, 1)
    edge = math.erf(_CUTOFF / math.sqrt(2))
    return torch.erfinv((2 * unit - 1) * edge) * math.sqrt(2)


def _mix(index: Tensor, salt: int) -> Tensor:
    """splitmix64 (Steele, Lea and Flood, OOPSLA 2014): int64 arithmetic wraps as its uint64 would."""
    z = index * _signed(0x9E3779B97F4A7C15) + salt
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's on int64 keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
