"""Kernels of packages that may be installed: FlashAttention 4, 3 and 2.

None is imported before it is used: they load CUDA libraries or a compiler, and take seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor

from torchtitan_lc.attention.kernels.base import Packing
from torchtitan_lc.attention.kernels.cuda import (
    VarlenKernel,
    capability,
    longest,
    needs_half_on_cuda,
    older_than,
)

FA4_MISSING = "needs the package flash-attn-4: pip install -e '.[fa4]' in the checkout"


def installed(module: str) -> bool:
    """Whether ``module`` (dotted) could be imported; imports neither it nor the packages above it.

    find_spec of a submodule would import its parents, and ``flash_attn`` is the parent of two things:
    flash-attn-4 puts flash_attn.cute there without an __init__, flash-attn (2) an __init__ that loads
    its CUDA library.
    """
    top, *parts = module.split(".")
    spec, name = importlib.util.find_spec(top), top
    for part in parts:
        name = f"{name}.{part}"
        spec = _find_within(spec.submodule_search_locations or [], name) if spec else None
    return spec is not None


def _find_within(folders: Iterable[str], name: str) -> ModuleSpec | None:
    """The spec of a submodule. A folder without code, left behind by an uninstall, is none."""
    for folder in folders:
        finder = pkgutil.get_importer(folder)
        spec = finder.find_spec(name) if finder is not None else None
        if spec is not None and spec.loader is not None:
            return spec
    return None


def _empty_grads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Plain memory for the gradients; left to themselves the packages copy the strides of views."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _deterministic() -> bool:
    """dq is summed by atomics unless a kernel is told otherwise, and these do not ask torch."""
    return torch.are_deterministic_algorithms_enabled()


class FlashAttention4(VarlenKernel):
    """flash-attn-4 (`pip install -e '.[fa4]'`): fastest on Hopper and Blackwell.

    Its functions are called directly: they compile at first use (seconds), and torch's own switch for
    FA4 does not know this release.
    """

    name = "fa4"

    def unsupported(
        self, device_type: str, dtype: torch.dtype, head_dim: int, packed: bool
    ) -> str | None:
        problem = needs_half_on_cuda(device_type, dtype, head_dim, 256, "math")
        if problem:
            return problem
        known = capability()
        if known is not None and known[0] not in (9, 10):
            return "needs a Hopper or Blackwell GPU: use cudnn or sdpa"
        if known is not None and known[0] == 10 and 128 < head_dim < 256:
            return f"does head sizes up to 128, and 256, on Blackwell, not {head_dim}: use sdpa"
        return None if installed("flash_attn.cute") else FA4_MISSING

    def flash_forward(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_fwd

        out, lse, *_ = _flash_attn_fwd(
            q, k, v, softmax_scale=scale, causal=causal, return_lse=True, **_varlen(packing)
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
        from flash_attn.cute.interface import _flash_attn_bwd

        dq, dk, dv = _empty_grads(q, k, v)
        _flash_attn_bwd(
            q,
            k,
            v,
            out,
            dout,
            lse,
            softmax_scale=scale,
            causal=causal,
            deterministic=_deterministic(),
            dq=dq,
            dk=dk,
            dv=dv,
            **_varlen(packing),
        )
        return dq, dk, dv


def _varlen(packing: Packing | None) -> dict[str, Any]:
    """Arguments of FlashAttention 3 and 4 for packed rows."""
    if packing is None:
        return {}
    cu, most = packing.cu_seqlens, packing.max_len
    return {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": most, "max_seqlen_k": most}


class FlashAttention3(VarlenKernel):
    """FlashAttention-3, which people build from source (its module is flash_attn_interface)."""

    name = "fa3"

    def unsupported(
        self, device_type: str, dtype: torch.dtype, head_dim: int, packed: bool
    ) -> str | None:
        problem = needs_half_on_cuda(device_type, dtype, head_dim, 256, "math")
        if problem:
            return problem
        known = capability()
        if known is not None and known[0] != 9:
            return "needs a Hopper GPU: use fa4, cudnn or sdpa"
        if not installed("flash_attn_interface"):
            return (
                "needs the module flash_attn_interface: build it from the folder hopper of the "
                "flash-attention sources, or use fa4"
            )
        return None

    def flash_forward(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._operators().fwd(
            q, k, v, softmax_scale=scale, is_causal=causal, num_splits=1, **_varlen(packing)
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
        dq, dk, dv = _empty_grads(q, k, v)
        # What it returns changed between releases; what it writes did not.
        self._operators().bwd(
            dout.contiguous(),
            q,
            k,
            v,
            out.contiguous(),
            lse,
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=scale,
            is_causal=causal,
            deterministic=_deterministic(),
            **_varlen(packing),
        )
        return dq, dk, dv

    @staticmethod
    def _operators() -> Any:
        importlib.import_module("flash_attn_interface")  # registers torch.ops.flash_attn_3
        return torch.ops.flash_attn_3


class FlashAttention2(VarlenKernel):
    """The package flash-attn; torch's own copy of the same kernel is ``sdpa``."""

    name = "fa2"

    def unsupported(
        self, device_type: str, dtype: torch.dtype, head_dim: int, packed: bool
    ) -> str | None:
        problem = needs_half_on_cuda(device_type, dtype, head_dim, 256, "math")
        if problem:
            return problem
        if older_than(8):
            return "needs an Ampere GPU or newer: use math"
        if not installed("flash_attn.flash_attn_interface"):
            return (
                "needs the package flash-attn (version 2): pip install flash-attn "
                "--no-build-isolation, or use sdpa, which is the same kernel"
            )
        return None

    def flash_forward(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        package = importlib.import_module("flash_attn.flash_attn_interface")
        options = self._options(packing, causal, scale)
        if packing is None:
            out, lse, *_ = package._flash_attn_forward(q, k, v, return_softmax=False, **options)
        else:
            out, lse, *_ = package._flash_attn_varlen_forward(
                q, k, v, return_softmax=False, **options
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
        package = importlib.import_module("flash_attn.flash_attn_interface")
        dq, dk, dv = _empty_grads(q, k, v)
        run = (
            package._flash_attn_backward if packing is None else package._flash_attn_varlen_backward
        )
        run(
            dout.contiguous(),
            q,
            k,
            v,
            out.contiguous(),
            lse,
            dq,
            dk,
            dv,
            deterministic=_deterministic(),
            **self._options(packing, causal, scale),
        )
        return dq, dk, dv

    @staticmethod
    def _options(packing: Packing | None, causal: bool, scale: float) -> dict[str, Any]:
        options: dict[str, Any] = {
            "dropout_p": 0.0,
            "softmax_scale": scale,
            "causal": causal,
            "window_size_left": -1,
            "window_size_right": -1,
            "softcap": 0.0,
            "alibi_slopes": None,
        }
        if packing is None:
            return options
        most = longest(packing)
        return {**options, **_varlen(packing), "max_seqlen_q": most, "max_seqlen_k": most}
