"""Parts that several benchmarks share: ranks, kernels that stand in or count, and the end of a block."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lc.attention.kernels import Kernel, choose_kernel
from torchtitan_lc.attention.kernels.stand_in import StandIn
from torchtitan_lc.attention.layout import Layout
from torchtitan_lc.distributed.fake_ranks import join_fake_ranks
from torchtitan_lc.distributed.setup import init_distributed


@dataclass(frozen=True)
class Call:
    """One kernel call: ``heads`` query heads of ``queries`` tokens on ``kv_heads`` of ``keys``."""

    direction: str  # "forward" or "backward"
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    @property
    def flops(self) -> float:
        """Two products of queries x keys forward, five backward; a causal mask leaves half of each."""
        products = 2 if self.direction == "forward" else 5
        area = self.queries * self.keys * (0.5 if self.causal else 1.0)
        return products * 2.0 * area * self.heads * self.head_dim


class Counting:
    """A kernel that also counts its calls, so that the same calls can be timed alone."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.name = kernel, kernel.name
        self.calls: Counter[Call] = Counter()

    def unsupported(
        self, device_type: str, dtype: torch.dtype, head_dim: int, packed: bool
    ) -> str | None:
        return self.kernel.unsupported(device_type, dtype, head_dim, packed)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> tuple[Tensor, Tensor]:
        self._count("forward", q, k, mask)
        return self.kernel.forward(q, k, v, **mask)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **mask: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._count("backward", q, k, mask)
        return self.kernel.backward(dout, q, k, v, out, lse, **mask)

    def _count(self, direction: str, q: Tensor, k: Tensor, mask: dict[str, Any]) -> None:
        _, queries, heads, head_dim = q.shape
        call = Call(direction, queries, k.shape[1], heads, k.shape[2], head_dim, mask["causal"])
        self.calls[call] += q.shape[0]


def get_kernel(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """By name, "auto" and "stand-in" too. Raises ValueError where it cannot do the case."""
    if name == "stand-in":
        return StandIn()
    choice = choose_kernel(name, device_type=device.type, dtype=dtype, head_dim=head_dim)
    return choice.kernel


class Loss(torch.autograd.Function):
    """Follows the block and keeps nothing; its backward makes the gradient of the block's output."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.like = (y.shape, y.dtype, y.device)
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        shape, dtype, device = ctx.like
        return torch.ones(shape, dtype=dtype, device=device)


def are_real() -> bool:
    """Whether torchrun started this process as one of several ranks."""
    return "RANK" in os.environ


def join(ranks: int, kind: str) -> torch.device:
    """Real ranks under torchrun, else this process as rank 0 of ``ranks`` on torch's fake group.

    A rank that fails leaves the others waiting in a collective: they give up after 10 minutes.
    """
    if are_real():
        device = init_distributed(kind, timeout_seconds=600, trace_buffer_size=2000)
    else:
        device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
        if kind == "cuda":
            torch.cuda.set_device(device)
        join_fake_ranks(ranks, device)
    if dist.get_world_size() != ranks:
        raise SystemExit(f"--ranks {ranks}, but {dist.get_world_size()} are running")
    return device


def peers() -> str:
    return "real ranks" if are_real() else "one process as rank 0, fake group"


def positions_of(layout: Layout, rank: int, seq_len: int, device: torch.device) -> Tensor:
    """[1, T] int64: the places of this rank's tokens in the row."""
    parts = [torch.arange(a, b, device=device) for a, b in layout.ranges(rank, seq_len)]
    return torch.cat(parts).view(1, -1)
