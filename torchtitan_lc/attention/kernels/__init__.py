"""Attention kernels behind one signature: forward -> (out, lse), backward(out, lse, ...) -> (dq, dk, dv).

A kernel is called explicitly, never through a dispatcher that may fall back to a quadratic one
without a word; what it cannot do is a ValueError that says what to use instead.

Shapes, for every kernel:
    q, out, dout  [B, Sq, n, D]      n query heads
    k, v          [B, Sk, m, D]      m KV heads, n a multiple of m; query head i uses KV head i // (n // m)
    lse           [B, n, Sq]         natural log of the sum of exponentials, fp32 (fp64 for fp64 input)
Results are plain contiguous; gradients have the shape and dtype of what they belong to.

Causal, Sq equals Sk. Not causal they may differ: ring attention is made of such rectangles. With
``documents`` (B rows of Sq = Sk tokens) a token attends to its own document only, causal or not.
"""

# Imported for its effect too: it registers the operators that every kernel is called through.
from torchtitan_lc.attention.kernels import ops
from torchtitan_lc.attention.kernels.base import Kernel
from torchtitan_lc.attention.kernels.choice import KERNELS, KernelChoice, choose_kernel
from torchtitan_lc.attention.kernels.cpu import CpuFlash, Math
from torchtitan_lc.attention.kernels.cuda import Cudnn, SdpaFlash
from torchtitan_lc.attention.kernels.packages import (
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
)

__all__ = [
    "KERNELS",
    "CpuFlash",
    "Cudnn",
    "FlashAttention2",
    "FlashAttention3",
    "FlashAttention4",
    "Kernel",
    "KernelChoice",
    "Math",
    "SdpaFlash",
    "choose_kernel",
    "ops",
]
