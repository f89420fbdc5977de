"""The kernels by name, and which one a job gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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


def choose_kernel(
    name: str, *, device_type: str, dtype: torch.dtype, head_dim: int, packed: bool = False
) -> KernelChoice:
    """The kernel called ``name``, or with "auto" the fastest that can do the case.

    packed: rows hold several documents. Raises ValueError when the named kernel cannot do it; the text
    says why and what to use or install.
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
    for candidate in KERNELS:
        kernel = KERNELS[candidate]()
        # On a GPU a call per document leaves most of it idle, and other kernels have a packed form.
        looping = packed and kernel.one_call_per_document and device_type != "cpu"
        if candidate == "math" or looping or kernel.unsupported(*case):
            continue
        reason = f"the fastest that is here for {text}" + _price(kernel, packed)
        if FlashAttention4().unsupported(*case) == FA4_MISSING:
            reason += "; on Hopper and Blackwell pip install 'torchtitan_lc[fa4]' would be faster"
        return KernelChoice(kernel, reason)
    return KernelChoice(Math(), f"no fused kernel does {text}; memory grows with seq_len squared")


def _price(kernel: OperatorKernel, packed: bool) -> str:
    if packed and kernel.one_call_per_document:
        return "; one call per document, slow where a row holds many"
    return ""
