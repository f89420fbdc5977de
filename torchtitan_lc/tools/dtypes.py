"""Config words for dtypes."""

from __future__ import annotations

import torch


def torch_dtype(name: str) -> torch.dtype:
    """ "bfloat16" -> torch.bfloat16; ValueError for a word that names no dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype
