"""Attention as one operator pair for all kernels.

    torchtitan_lc::attention_forward    q, k, v             -> out, lse
    torchtitan_lc::attention_backward   dout, q, k, v, ...  -> dq, dk, dv

What watches operators (a checkpoint policy's save list, torch.compile, a dry run on fake tensors) sees the
same two names whichever kernel runs, and their shapes without running it: packages bring no fake
versions, and those of torch's own operators differ in memory order from kernel to kernel. Results
are plain contiguous and share no memory with the inputs. There is no autograd formula on purpose: lse
has no gradient here, and whoever calls forward calls backward.

cu_seqlens is null for whole rows (then max_len is 0); see Packing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchtitan_lc.attention.kernels.base import Packing, lse_dtype
from torchtitan_lc.attention.kernels.choice import KERNELS

_HOW = "Tensor? cu_seqlens, SymInt max_len, str kernel, bool causal, float scale"


@torch.library.custom_op(
    "torchtitan_lc::attention_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_HOW}) -> (Tensor, Tensor)",
)
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    max_len: int,
    kernel: str,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    packing = None if cu_seqlens is None else Packing(cu_seqlens, max_len)
    out, lse = KERNELS[kernel]().compute(q, k, v, packing, causal, scale)
    return out.contiguous(), lse.contiguous()


@attention_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    max_len: int,
    kernel: str,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    rows, length, heads, _ = q.shape
    lse = q.new_empty((rows, heads, length), dtype=lse_dtype(q.dtype))
    return q.new_empty(q.shape), lse


@torch.library.custom_op(
    "torchtitan_lc::attention_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_HOW})"
    " -> (Tensor, Tensor, Tensor)",
)
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    max_len: int,
    kernel: str,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    packing = None if cu_seqlens is None else Packing(cu_seqlens, max_len)
    implementation = KERNELS[kernel]()
    grads = implementation.compute_backward(dout, q, k, v, out, lse, packing, causal, scale)
    dq, dk, dv = (x.contiguous() for x in grads)
    return dq, dk, dv


@attention_backward.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    max_len: int,
    kernel: str,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
