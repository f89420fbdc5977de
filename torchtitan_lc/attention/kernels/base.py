"""What a kernel promises to its callers, and what an implementation writes.

Kernel.forward / backward          a strategy calls these; shapes are checked
  -> torch.ops.torchtitan_lc.*     one operator pair for all kernels (ops.py)
    -> compute / compute_backward  the kernel itself
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from torchtitan_lc.attention.documents import Documents


class Kernel(Protocol):
    """See the package's docstring for shapes."""

    name: str

    def unsupported(
        self, device_type: str, dtype: torch.dtype, head_dim: int, packed: bool
    ) -> str | None:
        """Why this kernel cannot do the case, with the fix; None when it can."""

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
        """out and lse."""

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
        """dq, dk and dv. ``out`` and ``lse`` may be those of more keys than ``k`` holds: then these are
        the parts of the gradients that come from ``k``, as ring attention needs them."""


@dataclass(frozen=True)
class Packing:
    """What the operators carry of Documents.

    cu_seqlens: [number of documents + 1] int32 over B*S tokens, on the host for a kernel that is called
    once per document. max_len: tokens of the longest document.
    """

    cu_seqlens: Tensor
    max_len: int

    def slices(self, seq_len: int) -> list[tuple[slice, slice]]:
        """Rows and tokens of each document: x[rows, tokens] is [1, its length, ...]."""
        edges = self.cu_seqlens.tolist()
        starts = [(a // seq_len, a % seq_len, b - a) for a, b in pairwise(edges)]
        return [(slice(row, row + 1), slice(at, at + length)) for row, at, length in starts]


class OperatorKernel:
    """A kernel behind the operator pair: what KERNELS holds."""

    name: str
    one_call_per_document: ClassVar[bool] = False
    """It has no form for packed rows: right for any number of documents, slow for many."""

    def unsupported(
        self, device_type: str, dtype: torch.dtype, head_dim: int, packed: bool
    ) -> str | None:
        raise NotImplementedError

    def compute(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out and lse in any memory order, sharing no memory with the inputs."""
        raise NotImplementedError

    def compute_backward(
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
        """dq, dk and dv in any memory order, sharing no memory with the inputs."""
        raise NotImplementedError

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
        check_shapes(q, k, v, causal, documents)
        packing = self._packing(q, documents)
        return torch.ops.torchtitan_lc.attention_forward(
            q, k, v, *packing, self.name, causal, scale
        )

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
        check_shapes(q, k, v, causal, documents)
        packing = self._packing(q, documents)
        return torch.ops.torchtitan_lc.attention_backward(
            dout, q, k, v, out, lse, *packing, self.name, causal, scale
        )

    def _packing(self, q: Tensor, documents: Documents | None) -> tuple[Tensor | None, int]:
        if documents is None:
            return None, 0
        device = torch.device("cpu") if self.one_call_per_document else q.device
        return documents.cu_seqlens(device), documents.max_len


def check_shapes(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Documents | None
) -> None:
    """Raise ValueError where a kernel would read past its input or pair the wrong tokens."""
    rows, length_q, heads, _ = q.shape
    length_k, kv_heads = k.shape[1], k.shape[2]
    if k.shape != v.shape or k.shape[0] != rows or heads % kv_heads:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit: rows must be "
            "equal, k and v alike, and the query heads a multiple of the KV heads"
        )
    if causal and length_q != length_k:
        raise ValueError(
            f"causal attention of {length_q} queries on {length_k} keys has no agreed meaning: "
            "only a rectangle that is not causal may have two lengths"
        )
    if documents is not None:
        described = (documents.rows, documents.seq_len)
        if not described == (rows, length_q) == (rows, length_k):
            raise ValueError(
                f"documents describe {described[0]} rows of {described[1]} tokens, but q has "
                f"{rows} of {length_q} and k {rows} of {length_k}"
            )


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, and fp64 for fp64 input."""
    return torch.promote_types(dtype, torch.float32)


def heads_first(*tensors: Tensor) -> list[Tensor]:
    """[B, S, n, D] -> [B, n, S, D], views."""
    return [t.transpose(1, 2) for t in tensors]


class DocumentLoop(OperatorKernel):
    """A kernel that knows whole rows only: packed rows are cut at the document boundaries."""

    one_call_per_document = True

    def row_forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """compute of rows that are one document each."""
        raise NotImplementedError

    def row_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """compute_backward of rows that are one document each; lse is contiguous."""
        raise NotImplementedError

    def compute(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        if packing is None:
            return self.row_forward(q, k, v, causal, scale)
        rows, length, heads, _ = q.shape
        out = q.new_empty(q.shape)
        lse = q.new_empty(rows, heads, length, dtype=lse_dtype(q.dtype))
        for row, tokens in packing.slices(length):
            at = (row, tokens)
            out[at], lse[row, :, tokens] = self.row_forward(q[at], k[at], v[at], causal, scale)
        return out, lse

    def compute_backward(
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
        if packing is None:
            return self.row_backward(dout, q, k, v, out, lse, causal, scale)
        dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        for row, tokens in packing.slices(q.shape[1]):
            at = (row, tokens)
            part = lse[row, :, tokens].contiguous()
            dq[at], dk[at], dv[at] = self.row_backward(
                dout[at], q[at], k[at], v[at], out[at], part, causal, scale
            )
        return dq, dk, dv
