"""A kernel that computes nothing: for memory, at lengths whose attention takes hours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StandIn:
    """Allocates what a flash kernel does: its results, and in backward sums in ``wide`` beside them, of dq
    and, where a call has more query than KV heads, of dk and dv."""

    name = "stand-in"

    def __init__(self, wide: torch.dtype = torch.float32) -> None:
        self.wide = wide

    def unsupported(self, *_: Any) -> None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        lse = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        return _zeros(q), lse

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
        grads = _zeros(q), _zeros(k), _zeros(v)
        summed = (q, k, v) if q.shape[2] > k.shape[2] else (q,)
        sums = [_zeros(x, self.wide) for x in summed]
        del sums
        return grads


def _zeros(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_zeros(x.shape, dtype=dtype or x.dtype)  # contiguous, whatever x is
