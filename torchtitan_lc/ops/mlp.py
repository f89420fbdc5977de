"""The gated MLP (SwiGLU, Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """x [..., M], w1 and w3 [F, M], w2 [M, F] -> [..., M]: w2(silu(w1 x) * w3 x)."""
    return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)
