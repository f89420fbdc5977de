"""The shape of a decoder."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_lc.ops.rope import Scaling


@dataclass(frozen=True)
class DecoderArgs:
    """Names follow TorchTitan, the meaning Hugging Face's config.json.

    dim: model width M. hidden_dim: MLP width F. n_kv_heads: KV heads K, a divisor of n_heads.
    head_dim: size D of a head; 0 stands for dim / n_heads, and is replaced by it.
    qkv_bias: biases on the query, key and value projections (Qwen 2). qk_norm: RMSNorm over each
    query and key head before rope (Qwen 3). tie_embeddings: the output projection is the embedding
    table. max_position_embeddings: longest row, in tokens, for which weights and rope are made; None
    where nobody said. sliding_window: tokens that a token sees, itself among them; None for all.
    Attention here has no windows: rows longer than one are refused (decoder/settings.py).
    init_std: standard deviation of the initial weights (see Decoder.init_weights for the exceptions).

    Raises ValueError where heads do not fit one another, or cannot be rotated.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int
    head_dim: int = 0
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: Scaling | None = None
    max_position_embeddings: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    tie_embeddings: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.head_dim == 0:
            if self.dim % self.n_heads:
                raise ValueError(
                    f"dim = {self.dim} is no multiple of n_heads = {self.n_heads}: give head_dim"
                )
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)
        if self.head_dim % 2 or self.head_dim < 4:
            raise ValueError(
                f"head_dim = {self.head_dim}: rope turns pairs, so it must be even and at least 4"
            )
        if not self.rope_theta > 1:
            raise ValueError(f"rope_theta = {self.rope_theta}: must be above 1")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads = {self.n_heads} is no multiple of n_kv_heads = {self.n_kv_heads}"
            )

    def n_params(self) -> int:
        """Number of parameters; a tied table counts once."""
        q_dim, kv_dim = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        attention = 2 * self.dim * (q_dim + kv_dim)
        if self.qkv_bias:
            attention += q_dim + 2 * kv_dim
        if self.qk_norm:
            attention += 2 * self.head_dim
        layer = attention + 3 * self.dim * self.hidden_dim + 2 * self.dim
        tables = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return self.n_layers * layer + tables + self.dim
