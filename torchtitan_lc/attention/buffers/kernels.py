"""What kernels hold beside their inputs and results."""

from __future__ import annotations

from torchtitan_lc.attention.buffers.sizes import Sizes
from torchtitan_lc.attention.kernels.split import WHOLE

_FLASH_BLOCK = 128  # tokens to which flash kernels round their accumulators


def forward_workspace(s: Sizes, n: int) -> int:
    """Bytes of a forward call for ``n`` query heads of S tokens."""
    tokens = s.plan.ranks * s.tokens
    return 3 * n * s.rows * tokens * tokens * s.wide if s.kernel == "math" else 0


def backward_workspace(s: Sizes, n: int, m: int, share: float = 1.0) -> int:
    """Bytes of a backward call on S queries and a ``share`` of as many keys, as `SplitGroups`
    (kernels/split.py) makes it: whole, or a member of each group at a time, whose results lie beside
    those of all."""
    queries = s.rows * s.plan.ranks * s.tokens
    keys = int(queries * share)
    if n <= m or n * queries * s.head_dim <= WHOLE:
        return _of_one_call(s, n, m, queries, keys)
    part = m * (queries + 2 * keys) * s.head_dim * s.itemsize + m * queries * s.wide
    return part + _of_one_call(s, m, m, queries, keys)


def _of_one_call(s: Sizes, n: int, m: int, queries: int, keys: int) -> int:
    """The flash family sums dq in fp32, with two numbers per query beside it; dk and dv of grouped heads
    in fp32 (FlashAttention 3 and 4), or in the inputs' dtype for every query head (2). queries and keys are
    tokens of all rows."""
    d, wide = s.head_dim, s.wide
    if s.kernel == "math":
        return 5 * n * queries * keys * wide
    if s.kernel == "cpu":
        return n * queries * wide
    if s.kernel == "stand-in":
        return (n * queries + (2 * m * keys if n > m else 0)) * d * wide
    queries = -(-queries // _FLASH_BLOCK) * _FLASH_BLOCK
    keys = -(-keys // _FLASH_BLOCK) * _FLASH_BLOCK
    size = n * queries * (d + 2) * wide
    if n == m or s.kernel == "cudnn":
        return size
    if s.kernel in ("sdpa", "fa2"):
        return size + 2 * n * keys * d * (wide // 2)
    return size + 2 * m * keys * d * wide
