"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467), as Llama uses it."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., M] -> [..., M] in x's dtype: normalised in at least fp32, rounded, then scaled.

    That order, and the rounding before the scale, are Hugging Face's, so that the same weights give
    the same numbers in bf16.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight
