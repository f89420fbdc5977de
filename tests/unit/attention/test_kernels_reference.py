"""Dense attention, written from the definition: what every kernel must equal. And its own check."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

Bounds = tuple[tuple[int, ...], ...]


def visible(rows: int, length: int, causal: bool, bounds: Bounds | None) -> Tensor:
    """[B, S, S] bool: whether query i of a row sees key j. Document by document, in plain loops."""
    sees = torch.zeros(rows, length, length, dtype=torch.bool)
    for row in range(rows):
        edges = bounds[row] if bounds is not None else (0, length)
        for a, b in zip(edges, edges[1:], strict=False):
            for i in range(a, b):
                sees[row, i, a : (i + 1 if causal else b)] = True
    return sees


def dense(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sees: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q [B,Sq,n,D], k, v [B,Sk,m,D], sees [B,Sq,Sk] (None: all) -> out [B,Sq,n,D], lse [B,n,Sq]."""
    group = q.shape[2] // k.shape[2]
    outs, lses = [], []
    for head in range(q.shape[2]):
        scores = q[:, :, head] @ k[:, :, head // group].mT * scale
        if sees is not None:
            scores = scores.masked_fill(~sees, -math.inf)
        outs.append(scores.softmax(-1) @ v[:, :, head // group])
        lses.append(scores.logsumexp(-1))
    return torch.stack(outs, 2), torch.stack(lses, 1)


def dense_with_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, sees: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """out, lse and (dq, dk, dv) by autograd."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out, lse = dense(q, k, v, scale, sees)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return out.detach(), lse.detach(), grads


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bounds", [None, ((0, 4, 5, 11), (0, 10, 11))])
def test_the_reference_itself_agrees_with_torch(causal: bool, bounds: Bounds | None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 11, n, 8, dtype=torch.float64) for n in (4, 2, 2))
    sees = visible(2, 11, causal, bounds)
    out, _ = dense(q, k, v, 0.3, sees)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    want = F.scaled_dot_product_attention(
        q, k, v, attn_mask=sees.unsqueeze(1), scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out.transpose(1, 2), want, rtol=0, atol=1e-13)
