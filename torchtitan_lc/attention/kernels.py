"""Attention kernels behind one signature: forward -> (out, lse), backward(out, lse, ...) -> (dq, dk, dv).

A kernel is called explicitly, never through a dispatcher that may fall back to a quadratic one
without a word; what it cannot do is a ValueError that says what to use instead.

Shapes, for every kernel:
    q, out, dout  [B, S, n, D]      n query heads
    k, v          [B, S, m, D]      m KV heads, n a multiple of m; query head i uses KV head i // (n // m)
    lse           [B, n, S]         natural log of the sum of exponentials, fp32 (fp64 for fp64 input)
Gradients come back in the shape and dtype of what they belong to.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_aten = torch.ops.aten


class Kernel(Protocol):
    name: str

    def unsupported(self, device_type: str, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why this kernel cannot do the case, with the fix; None when it can."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """[B, S, n, D] -> [B, n, S, D], views."""
    return [t.transpose(1, 2) for t in tensors]


class CpuFlash:
    """torch's flash attention for CPUs: any float dtype, grouped KV heads natively."""

    name = "cpu"

    def unsupported(self, device_type: str, dtype: torch.dtype, head_dim: int) -> str | None:
        if device_type != "cpu":
            return f"runs on CPU tensors only, not on {device_type}: use cudnn, fa4 or sdpa"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            *_heads_first(q, k, v), 0.0, causal, scale=scale
        )
        # The op returns lse as [B, n, S] in [B, S, n] memory order; the layout promised here is plain.
        return out.transpose(1, 2), lse.contiguous()

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_heads_first(dout, q, k, v, out), lse, 0.0, causal, scale=scale
        )
        dq, dk, dv = _heads_first(*grads)
        return dq, dk, dv


class Cudnn:
    """cuDNN's fused attention through torch's own operator (no package to install)."""

    name = "cudnn"

    def unsupported(self, device_type: str, dtype: torch.dtype, head_dim: int) -> str | None:
        if device_type != "cuda":
            return f"needs a CUDA device, not {device_type}: use cpu"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"computes in bfloat16 or float16, not {dtype}: use math for fp32"
        if head_dim % 8 or head_dim > 128:
            return f"does head sizes that are multiples of 8 up to 128, not {head_dim}: use sdpa"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            *_heads_first(q, k, v), None, True, 0.0, causal, False, scale=scale
        )
        return out.transpose(1, 2), lse.view(lse.shape[:3])

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Without dropout the Philox state is never read, but the operator wants tensors.
        philox = torch.empty(2, dtype=torch.int64, device=q.device)
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            *_heads_first(dout, q, k, v, out),
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
        dq, dk, dv = _heads_first(*grads)
        return dq, dk, dv


class SdpaFlash:
    """FlashAttention-2 as built into torch."""

    name = "sdpa"

    def unsupported(self, device_type: str, dtype: torch.dtype, head_dim: int) -> str | None:
        if device_type != "cuda":
            return f"needs a CUDA device, not {device_type}: use cpu"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"computes in bfloat16 or float16, not {dtype}: use math for fp32"
        if head_dim % 8 or head_dim > 256:
            return f"does head sizes that are multiples of 8 up to 256, not {head_dim}"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        seq_q, seq_k = q.shape[1], k.shape[1]
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, None, None, seq_q, seq_k, 0.0, causal, False, scale=scale
        )
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        philox = torch.empty(2, dtype=torch.int64, device=q.device)  # unread: there is no dropout
        return _aten._flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            causal,
            philox[0],
            philox[1],
            scale=scale,
        )


class FlashAttention4:
    """flash-attn-4 (`pip install torchtitan_lc[fa4]`): fastest on Hopper and Blackwell.

    Its functions are called directly: they compile at first use (seconds), and torch's own switch for
    FA4 does not know this release.
    """

    name = "fa4"

    def unsupported(self, device_type: str, dtype: torch.dtype, head_dim: int) -> str | None:
        if importlib.util.find_spec("flash_attn") is None or (
            importlib.util.find_spec("flash_attn.cute") is None
        ):
            return "needs the package flash-attn-4: pip install 'torchtitan_lc[fa4]'"
        if device_type != "cuda":
            return f"needs a CUDA device, not {device_type}: use cpu"
        if torch.cuda.get_device_capability()[0] not in (9, 10):
            return "needs a Hopper or Blackwell GPU: use cudnn"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"computes in bfloat16 or float16, not {dtype}: use math for fp32"
        if head_dim % 8 or head_dim > 256:
            return f"does head sizes that are multiples of 8 up to 256, not {head_dim}: use sdpa"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_fwd

        out, lse, *_ = _flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_bwd

        dq, dk, dv = _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=scale, causal=causal)
        return dq, dk, dv


class Math:
    """Plain matrix products in at least fp32: the reference. Memory grows with S squared."""

    name = "math"

    def unsupported(self, device_type: str, dtype: torch.dtype, head_dim: int) -> str | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        scores, wide_v = self._scores(q, k, v, causal, scale)
        lse = scores.logsumexp(dim=-1)  # [B, n, S]
        out = (scores - lse.unsqueeze(-1)).exp() @ wide_v
        return out.transpose(1, 2).to(q.dtype), lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores, wide_v = self._scores(q, k, v, causal, scale)
        p = (scores - lse.unsqueeze(-1)).exp()  # [B, n, S, S]
        wide_q, wide_do, wide_o = (t.to(p.dtype) for t in _heads_first(q, dout, out))
        group = q.shape[2] // k.shape[2]
        wide_k = k.transpose(1, 2).to(p.dtype).repeat_interleave(group, dim=1)
        dv = p.transpose(-1, -2) @ wide_do
        dp = wide_do @ wide_v.transpose(-1, -2)
        delta = (wide_do * wide_o).sum(dim=-1, keepdim=True)
        ds = p * (dp - delta) * scale
        dq, dk = ds @ wide_k, ds.transpose(-1, -2) @ wide_q
        dk, dv = (t.unflatten(1, (-1, group)).sum(dim=2) for t in (dk, dv))
        dq, dk, dv = _heads_first(dq, dk, dv)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    @staticmethod
    def _scores(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        group = q.shape[2] // k.shape[2]
        wide_q, wide_k, wide_v = (t.to(dtype) for t in _heads_first(q, k, v))
        wide_k = wide_k.repeat_interleave(group, dim=1)
        scores = (wide_q @ wide_k.transpose(-1, -2)) * scale
        if causal:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(ahead, float("-inf"))
        return scores, wide_v.repeat_interleave(group, dim=1)


KERNELS: dict[str, type[Kernel]] = {
    "fa4": FlashAttention4,
    "cpu": CpuFlash,
    "cudnn": Cudnn,
    "sdpa": SdpaFlash,
    "math": Math,
}


@dataclass(frozen=True)
class KernelChoice:
    kernel: Kernel
    reason: str


def choose_kernel(
    name: str, *, device_type: str, dtype: torch.dtype, head_dim: int
) -> KernelChoice:
    """The kernel called ``name``, or with "auto" the fastest that can do the case.

    Raises ValueError when the named kernel cannot do it; the text says why and what to use.
    """
    if name != "auto":
        kernel = KERNELS[name]()
        problem = kernel.unsupported(device_type, dtype, head_dim)
        if problem:
            raise ValueError(f"attention.kernel = {name!r} {problem}")
        return KernelChoice(kernel, "named in the config")
    case = f"{device_type}, {str(dtype).removeprefix('torch.')}, head size {head_dim}"
    for candidate in ("fa4", "cudnn", "sdpa", "cpu"):
        kernel = KERNELS[candidate]()
        if kernel.unsupported(device_type, dtype, head_dim) is None:
            return KernelChoice(kernel, f"first choice for {case}")
    return KernelChoice(Math(), f"no fused kernel does {case}; memory grows with seq_len squared")
