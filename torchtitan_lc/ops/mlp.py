"""The gated MLP (SwiGLU, Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from torchtitan_lc.ops.linear import Linear

_PLAIN: tuple[Linear, Linear, Linear] = (F.linear, F.linear, F.linear)


def swiglu(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    linears: tuple[Linear, Linear, Linear] = _PLAIN,
) -> Tensor:
    """x [..., M], w1 and w3 [F, M], w2 [M, F] -> [..., M]: w2(silu(w1 x) * w3 x).

    linears: what multiplies with w1, w2 and w3."""
    linear1, linear2, linear3 = linears
    return linear2(F.silu(linear1(x, w1)) * linear3(x, w3), w2)
