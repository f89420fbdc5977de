"""The kernels by name, and which one a job gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.attention.kernels.base import Kernel, OperatorKernel
from torchtitan_lc.attention.kernels.cpu import CpuFlash, Math
from torchtitan_lc.attention.kernels.cuda import Cudnn, SdpaFlash
from torchtitan_lc.attention.kernels.packages import (
    FA4_MISSING,
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
)

# From the fastest to the slowest; math is no choice but the last resort.
KERNELS: dict[str, type[OperatorKernel]] = {
    "fa4": FlashAttention4,
    "fa3": FlashAttention3,
    "cudnn": Cudnn,
    "sdpa": SdpaFlash,
    "fa2": FlashAttention2,
    "cpu": CpuFlash,
    "math": Math,
}


@dataclass(frozen=True)
class KernelChoice:
    kernel: Kernel
    reason: str


class ByRows:
    """Two kernels as one: ``whole`` for rows that are one document (and the rectangles of a ring),
    ``packed`` for rows of several. Either one's lse is the natural logarithm, so they mix freely."""

    def __init__(self, whole: Kernel, packed: Kernel) -> None:
        self.whole, self.packed = whole, packed
        self.name = f"{whole.name}, for packed rows {packed.name}"

    def unsupported(
        self, device_type: str, dtype: torch.dtype, head_dim: int, packed: bool
    ) -> str | None:
        whole = self.whole.unsupported(device_type, dtype, head_dim, False)
        return whole or self.packed.unsupported(device_type, dtype, head_dim, True)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor]:
        kernel = self.whole if documents is None else self.packed
        return kernel.forward(q, k, v, causal=causal, scale=scale, documents=documents)

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
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel = self.whole if documents is None else self.packed
        return kernel.backward(
            dout, q, k, v, out, lse, causal=causal, scale=scale, documents=documents
        )


def choose_kernel(
    name: str, *, device_type: str, dtype: torch.dtype, head_dim: int, packed: bool = False
) -> KernelChoice:
    """The kernel called ``name``, or with "auto" the fastest that can do the case.

    packed: rows may hold several documents. Where the fastest kernel has no form for those, "auto"
    gives it the rows that are one document and another the rest. Raises ValueError when the named
    kernel cannot do the case; the text says why and what to use or install.
    """
    case = (device_type, dtype, head_dim, packed)
    if name != "auto":
        kernel = KERNELS[name]()
        problem = kernel.unsupported(*case)
        if problem:
            raise ValueError(f"attention.kernel = {name!r} {problem}")
        return KernelChoice(kernel, "named in the config" + _price(kernel, packed))
    text = f"{device_type}, {str(dtype).removeprefix('torch.')}, head size {head_dim}"
    text += ", packed rows" if packed else ""
    found = _fastest(device_type, dtype, head_dim, packed)
    if found is None:
        reason = f"no fused kernel does {text}; memory grows with seq_len squared"
        return KernelChoice(Math(), reason)
    reason = f"the fastest that is here for {text}" + _price(found, packed)
    if FlashAttention4().unsupported(*case) == FA4_MISSING:
        reason += "; on Hopper and Blackwell pip install -e '.[fa4]' would be faster"
    whole = _fastest(device_type, dtype, head_dim, packed=False)
    if whole is not None and whole.name != found.name:
        return KernelChoice(ByRows(whole, found), reason)
    return KernelChoice(found, reason)


def _fastest(
    device_type: str, dtype: torch.dtype, head_dim: int, packed: bool
) -> OperatorKernel | None:
    for candidate in KERNELS:
        kernel = KERNELS[candidate]()
        # On a GPU a call per document leaves most of it idle, and other kernels have a packed form.
        looping = packed and kernel.one_call_per_document and device_type != "cpu"
        usable = kernel.unsupported(device_type, dtype, head_dim, packed) is None
        if candidate != "math" and usable and not looping:
            return kernel
    return None


def _price(kernel: OperatorKernel, packed: bool) -> str:
    if packed and kernel.one_call_per_document:
        return "; one call per document, slow where a row holds many"
    return ""
