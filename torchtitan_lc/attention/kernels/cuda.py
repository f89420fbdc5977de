"""Kernels for CUDA that come with torch: cuDNN's and FlashAttention-2."""

from __future__ import annotations

import torch
from torch import Tensor

from torchtitan_lc.attention.kernels.base import (
    DocumentLoop,
    OperatorKernel,
    Packing,
    heads_first,
)
from torchtitan_lc.attention.kernels.cpu import Math

_aten = torch.ops.aten


def needs_half_on_cuda(
    device_type: str, dtype: torch.dtype, head_dim: int, largest: int, instead: str
) -> str | None:
    """The limits that all fused CUDA kernels share; ``instead``: what to use for larger heads."""
    if device_type != "cuda":
        return f"needs a CUDA device, not {device_type}: use cpu"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 or float16, not {dtype}: use math for fp32"
    if head_dim % 8 or head_dim > largest:
        return (
            f"does head sizes that are multiples of 8 up to {largest}, not {head_dim}: "
            f"use {instead}"
        )
    return None


def capability() -> tuple[int, int] | None:
    """Compute capability of the GPU; None where there is none to ask (planning on another machine)."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def older_than(major: int) -> bool:
    known = capability()
    return known is not None and known[0] < major


def _no_philox(q: Tensor) -> Tensor:
    """Without dropout the random state is never read, but the operators want tensors."""
    return torch.empty(2, dtype=torch.int64, device=q.device)


def head_slices(q: Tensor, k: Tensor, limit: int = 2**31 - 1) -> list[tuple[slice, slice]]:
    """(query heads, KV heads) of each call, so that no tensor of a call has more than ``limit`` elements.

    Raises ValueError where a single KV head with its query heads is larger.
    """
    group = q.shape[2] // k.shape[2]
    elements = q.shape[0] * max(q.shape[1], k.shape[1]) * group * q.shape[3]  # of one KV head
    at_once = limit // elements
    if at_once == 0:
        raise ValueError(
            f"cudnn computes at most {limit} elements at once, and one KV head with its query heads "
            f"has {elements}: use fa4, sdpa, fewer heads per stage or more ranks"
        )
    return [
        (slice(kv * group, min(kv + at_once, k.shape[2]) * group), slice(kv, kv + at_once))
        for kv in range(0, k.shape[2], at_once)
    ]


def within_reach(x: Tensor, limit: int = 2**31 - 1) -> Tensor:
    """``x``, as a contiguous copy if from its first to its last element is more than ``limit``."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x if last < limit else x.contiguous()


class Cudnn(DocumentLoop):
    """cuDNN's fused attention through torch's own operator (no package to install).

    It builds a plan for every new pair of lengths, so packed rows of many lengths are slow.

    Tensors of a call stay below 2^31 elements from their first to their last: beyond, cuDNN 9.19 took
    the wrong rows of q in backward (H200; dk off by up to 22 %, nothing said). So a call gets as many
    heads as fit, and a copy of them where they are a view of something larger.
    """

    name = "cudnn"

    def unsupported(
        self, device_type: str, dtype: torch.dtype, head_dim: int, packed: bool
    ) -> str | None:
        problem = needs_half_on_cuda(device_type, dtype, head_dim, 128, "sdpa or fa4")
        if problem is None and older_than(8):
            return "needs an Ampere GPU or newer: use math"
        return problem

    def row_forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        if k.shape[1] == 1:  # cuDNN refuses a single key; matrix products are linear in it
            return Math().compute(q, k, v, None, causal, scale)
        parts = head_slices(q, k)
        if len(parts) > 1:
            each = [
                self.row_forward(q[:, :, heads], k[:, :, kv], v[:, :, kv], causal, scale)
                for heads, kv in parts
            ]
            return torch.cat([e[0] for e in each], 2), torch.cat([e[1] for e in each], 1)
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            *heads_first(*map(within_reach, (q, k, v))), None, True, 0.0, causal, False, scale=scale
        )
        return out.transpose(1, 2), lse.view(lse.shape[:3])

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
        if k.shape[1] == 1:
            return Math().compute_backward(dout, q, k, v, out, lse, None, causal, scale)
        parts = head_slices(q, k)
        if len(parts) > 1:
            each = [
                self.row_backward(
                    dout[:, :, heads],
                    q[:, :, heads],
                    k[:, :, kv],
                    v[:, :, kv],
                    out[:, :, heads],
                    lse[:, heads].contiguous(),
                    causal,
                    scale,
                )
                for heads, kv in parts
            ]
            dq, dk, dv = (torch.cat(grads, 2) for grads in zip(*each, strict=True))
            return dq, dk, dv
        philox = _no_philox(q)
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            *heads_first(*map(within_reach, (dout, q, k, v, out))),
            lse.unsqueeze(-1),
            philox[0],
            philox[1],
            None,
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            causal,
            scale=scale,
        )
        dq, dk, dv = heads_first(*grads)
        return dq, dk, dv


class VarlenKernel(OperatorKernel):
    """A kernel of the FlashAttention family, which has a form for packed rows.

    whole rows    q [B, S, n, D], lse [B, n, S]
    packed rows   q [B*S, n, D] (here T = B*S), lse [n, T], and where each document begins
    """

    def flash_forward(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def flash_backward(
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
        raise NotImplementedError

    def compute(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        if packing is None:
            return self.flash_forward(q, k, v, None, causal, scale)
        rows = q.shape[0]
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        out, lse = self.flash_forward(q, k, v, packing, causal, scale)
        # lse: [n, B*S] -> [B, n, S]
        return out.unflatten(0, (rows, -1)), lse.unflatten(1, (rows, -1)).transpose(0, 1)

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
        if packing is None:
            return self.flash_backward(dout, q, k, v, out, lse, None, causal, scale)
        rows = q.shape[0]
        dout, q, k, v, out = (x.flatten(0, 1) for x in (dout, q, k, v, out))
        lse = lse.transpose(0, 1).flatten(1).contiguous()  # [B, n, S] -> [n, B*S]
        grads = self.flash_backward(dout, q, k, v, out, lse, packing, causal, scale)
        dq, dk, dv = (x.unflatten(0, (rows, -1)) for x in grads)
        return dq, dk, dv


def longest(packing: Packing) -> int:
    """An upper bound of the documents' lengths, as FlashAttention-2 wants it.

    Told that no document has two tokens, it takes a path meant for decoding, which returns lse in
    another order when several query heads share a KV head.
    """
    return max(packing.max_len, 2)


class SdpaFlash(VarlenKernel):
    """FlashAttention-2 as built into torch."""

    name = "sdpa"

    def unsupported(
        self, device_type: str, dtype: torch.dtype, head_dim: int, packed: bool
    ) -> str | None:
        problem = needs_half_on_cuda(device_type, dtype, head_dim, 256, "math")
        if problem is None and older_than(8):
            return "needs an Ampere GPU or newer: use math"
        return problem

    def flash_forward(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, *self._lengths(q, k, packing), 0.0, causal, False, scale=scale
        )
        return out, lse

    def flash_backward(
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
        lengths = self._lengths(q, k, packing)
        philox = _no_philox(q)
        return _aten._flash_attention_backward(
            dout, q, k, v, out, lse, *lengths, 0.0, causal, philox[0], philox[1], scale=scale
        )

    @staticmethod
    def _lengths(
        q: Tensor, k: Tensor, packing: Packing | None
    ) -> tuple[Tensor | None, Tensor | None, int, int]:
        if packing is None:
            return None, None, q.shape[1], k.shape[1]
        cu, most = packing.cu_seqlens, longest(packing)
        return cu, cu, most, most
