"""The backward pass of grouped query heads in calls of as many query as KV heads each.

Flash kernels hold dq in fp32 for all heads of a call, and with groups dk and dv in fp32 too. For long rows
that is more than all of the call's inputs, so there the members of a group take turns: the same work in
calls that still fill the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchtitan_lc.attention.kernels.base import Kernel

# Elements of q up to which a call goes as it is: 512 MiB of bf16, so 1 GiB of fp32 dq.
WHOLE = 2**28


class SplitGroups:
    """A kernel whose large backward calls are split; dk and dv of the parts are summed in their dtype."""

    def __init__(self, kernel: Kernel, whole: int = WHOLE) -> None:
        self.kernel, self.whole = kernel, whole
        self.name = kernel.name

    def unsupported(
        self, device_type: str, dtype: torch.dtype, head_dim: int, packed: bool = False
    ) -> str | None:
        return self.kernel.unsupported(device_type, dtype, head_dim, packed)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> tuple[Tensor, Tensor]:
        return self.kernel.forward(q, k, v, **mask)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **mask: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = q.shape[2] // max(k.shape[2], 1)
        if group <= 1 or q.numel() <= self.whole:
            return self.kernel.backward(dout, q, k, v, out, lse, **mask)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for member in range(group):
            heads = slice(member, None, group)
            parts = self.kernel.backward(
                dout[:, :, heads],
                q[:, :, heads],
                k,
                v,
                out[:, :, heads],
                lse[:, heads].contiguous(),
                **mask,
            )
            dq[:, :, heads] = parts[0]
            dk += parts[1]
            dv += parts[2]
            del parts
        return dq, dk, dv
