"""A block of a decoder on the meta device as rank 0 of many, its exchanges replaced by nothing: real shapes,
real frees, no peers, no time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from torchtitan_lc.attention import comm, ring
from torchtitan_lc.tools.meter import Meter


class StandIn:
    """A kernel that allocates what a flash kernel does: its results, and dq in fp32 beside them."""

    name = "stand-in"

    def unsupported(self, *_: Any) -> None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        return q.new_empty(q.shape), lse

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
        return q.new_empty(q.shape, dtype=torch.float32).to(q.dtype), dk, dv


class _NoPeers:
    """In place of torch.distributed: what is received is allocated by its caller, and stays as it is."""

    isend = irecv = None
    ProcessGroup = object

    def all_to_all_single(self, *_: Any, **__: Any) -> None: ...

    def get_global_rank(self, *_: Any) -> int:
        return 0

    def P2POp(self, *args: Any) -> Any:
        return args

    def batch_isend_irecv(self, calls: list[Any]) -> list[Any]:
        return []


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (comm, ring):
        monkeypatch.setattr(module, "dist", _NoPeers())


@dataclass(frozen=True)
class Peaks:
    """Bytes beside the weights: of forward, kept for backward, of backward."""

    forward: int
    kept: int
    backward: int


class _Loss(torch.autograd.Function):
    """Follows the block and keeps nothing; its backward makes the gradient of the block's output."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.like = (y.shape, y.dtype)
        return y.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype, device="meta")


def measure(block: Any, rows: int, tokens: int, width: int, head_dim: int) -> Peaks:
    """Of ``block(h, rope's angles)``, counted from its own input on."""
    angles = torch.empty((rows, tokens, head_dim // 2), device="meta")
    before = torch.empty(
        (rows, tokens, width), dtype=torch.bfloat16, device="meta", requires_grad=True
    )
    with Meter() as live:
        h = before * 1  # as after another block
        y = block(h, angles)
        del h
        forward = live.peak
        loss = _Loss.apply(y)
        del y
        kept = live.now
        live.restart()
        loss.backward()
        before.grad = None
    return Peaks(forward, kept, live.peak)
