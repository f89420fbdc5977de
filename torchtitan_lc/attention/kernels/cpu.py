"""Kernels that need no GPU: torch's flash attention for CPUs, and plain matrix products anywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from torchtitan_lc.attention.kernels.base import (
    DocumentLoop,
    OperatorKernel,
    Packing,
    heads_first,
    lse_dtype,
)

_aten = torch.ops.aten


class CpuFlash(DocumentLoop):
    """torch's flash attention for CPUs: any float dtype, grouped KV heads natively."""

    name = "cpu"

    def unsupported(
        self, device_type: str, dtype: torch.dtype, head_dim: int, packed: bool
    ) -> str | None:
        if device_type != "cpu":
            return f"runs on CPU tensors only, not on {device_type}: use cudnn, fa4 or sdpa"
        return None

    def row_forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            *heads_first(q, k, v), 0.0, causal, scale=scale
        )
        return out.transpose(1, 2), lse

    def row_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads_first(dout, q, k, v, out), lse, 0.0, causal, scale=scale
        )
        dq, dk, dv = heads_first(*grads)
        return dq, dk, dv


class Math(OperatorKernel):
    """Plain matrix products in at least fp32: the reference. Memory grows with S squared."""

    name = "math"

    def unsupported(
        self, device_type: str, dtype: torch.dtype, head_dim: int, packed: bool
    ) -> str | None:
        return None

    def compute(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        scores = _scores(q, k, packing, causal, scale)
        lse = scores.logsumexp(dim=-1)  # [B, n, Sq]
        out = (scores - lse.unsqueeze(-1)).exp() @ _wide(v, q)
        return out.transpose(1, 2).to(q.dtype), lse

    def compute_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        packing: Packing | None,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        p = (_scores(q, k, packing, causal, scale) - lse.unsqueeze(-1)).exp()  # [B, n, Sq, Sk]
        wide_q, wide_do, wide_o = (t.to(p.dtype) for t in heads_first(q, dout, out))
        dv = p.transpose(-1, -2) @ wide_do
        dp = wide_do @ _wide(v, q).transpose(-1, -2)
        delta = (wide_do * wide_o).sum(dim=-1, keepdim=True)
        ds = p * (dp - delta) * scale
        dq, dk = ds @ _wide(k, q), ds.transpose(-1, -2) @ wide_q
        group = q.shape[2] // k.shape[2]
        dk, dv = (t.unflatten(1, (-1, group)).sum(dim=2) for t in (dk, dv))
        dq, dk, dv = heads_first(dq, dk, dv)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _wide(x: Tensor, q: Tensor) -> Tensor:
    """k or v [B, S, m, D] -> [B, n, S, D]: a copy of its KV head for every query head, in fp32 or fp64."""
    heads = x.transpose(1, 2).to(lse_dtype(x.dtype))
    return heads.repeat_interleave(q.shape[2] // x.shape[2], dim=1)


def _scores(q: Tensor, k: Tensor, packing: Packing | None, causal: bool, scale: float) -> Tensor:
    """[B, n, Sq, Sk], minus infinity where a query does not see a key."""
    wide_q = q.transpose(1, 2).to(lse_dtype(q.dtype))
    scores = (wide_q @ _wide(k, q).transpose(-1, -2)) * scale
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
    if packing is not None:
        rows, length = q.shape[:2]
        tokens = torch.arange(rows * length, device=q.device)
        document = torch.bucketize(tokens, packing.cu_seqlens, right=True).view(rows, 1, length)
        other = document.unsqueeze(-1) != document.unsqueeze(-2)
        scores = scores.masked_fill(other, float("-inf"))
    return scores
