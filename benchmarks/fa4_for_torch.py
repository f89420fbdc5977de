"""flash-attn-4 as torch 2.11's switch for it (torch.nn.attention._fa4) expects it: a module with these two
functions, of which forward returns out and lse alone. Later releases return more.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def _flash_attn_fwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    from flash_attn.cute import interface

    out, lse, *_ = interface._flash_attn_fwd(*args, **kwargs)
    return out, lse


def _flash_attn_bwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute import interface

    dq, dk, dv, *_ = interface._flash_attn_bwd(*args, **kwargs)
    return dq, dk, dv
