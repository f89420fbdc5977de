"""The shape of a decoder."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_lc.ops.rope import Llama3Scaling


@dataclass(frozen=True)
class DecoderArgs:
    """Names follow TorchTitan, the meaning Hugging Face's config.json.

    dim: model width M. hidden_dim: MLP width F. n_kv_heads: KV heads K, a divisor of n_heads.
    tie_embeddings: the output projection is the embedding table. init_std: standard deviation of the
    initial weights (see Decoder.init_weights for the exceptions).
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: Llama3Scaling | None = None
    tie_embeddings: bool = False
    init_std: float = 0.02

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    def n_params(self) -> int:
        """Number of parameters; a tied table counts once."""
        attention = 2 * self.dim * (self.n_heads + self.n_kv_heads) * self.head_dim
        layer = attention + 3 * self.dim * self.hidden_dim + 2 * self.dim
        tables = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return self.n_layers * layer + tables + self.dim
