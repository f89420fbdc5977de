"""Llama 3 and what has its architecture: the published shapes, and the registration."""

from __future__ import annotations

from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.hf import Family
from torchtitan_lc.models.decoder.registration import register_decoder
from torchtitan_lc.ops.rope import Llama3Scaling

# Shapes and rope settings as in the config.json that each checkpoint is published with: Llama 3.2 (1B,
# 3B), Llama 3.1 (8B, 70B, 405B; 70B is 3.3's too), Llama 3.0, SmolLM2.
FLAVORS = {
    "debugmodel": DecoderArgs(
        dim=192, n_layers=3, n_heads=8, n_kv_heads=4, hidden_dim=448, vocab_size=264
    ),
    "1B": DecoderArgs(
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        hidden_dim=8192,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        rope_scaling=Llama3Scaling(factor=32.0),
        tie_embeddings=True,
    ),
    "3B": DecoderArgs(
        dim=3072,
        n_layers=28,
        n_heads=24,
        n_kv_heads=8,
        hidden_dim=8192,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        rope_scaling=Llama3Scaling(factor=32.0),
        tie_embeddings=True,
    ),
    "8B": DecoderArgs(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        hidden_dim=14_336,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        rope_scaling=Llama3Scaling(),
    ),
    "70B": DecoderArgs(
        dim=8192,
        n_layers=80,
        n_heads=64,
        n_kv_heads=8,
        hidden_dim=28_672,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        rope_scaling=Llama3Scaling(),
    ),
    "405B": DecoderArgs(
        dim=16_384,
        n_layers=126,
        n_heads=128,
        n_kv_heads=8,
        hidden_dim=53_248,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        rope_scaling=Llama3Scaling(),
    ),
    "3.0-8B": DecoderArgs(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        hidden_dim=14_336,
        vocab_size=128_256,
        max_position_embeddings=8192,
    ),
    "3.0-70B": DecoderArgs(
        dim=8192,
        n_layers=80,
        n_heads=64,
        n_kv_heads=8,
        hidden_dim=28_672,
        vocab_size=128_256,
        max_position_embeddings=8192,
    ),
    "SmolLM2-135M": DecoderArgs(
        dim=576,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        hidden_dim=1536,
        vocab_size=49_152,
        rope_theta=100_000.0,
        max_position_embeddings=8192,
        tie_embeddings=True,
    ),
    "SmolLM2-360M": DecoderArgs(
        dim=960,
        n_layers=32,
        n_heads=15,
        n_kv_heads=5,
        hidden_dim=2560,
        vocab_size=49_152,
        rope_theta=100_000.0,
        max_position_embeddings=8192,
        tie_embeddings=True,
    ),
    "SmolLM2-1.7B": DecoderArgs(
        dim=2048,
        n_layers=24,
        n_heads=32,
        n_kv_heads=32,
        hidden_dim=8192,
        vocab_size=49_152,
        rope_theta=130_000.0,
        max_position_embeddings=8192,
        tie_embeddings=True,
    ),
}

register_decoder("llama3", FLAVORS, Family("llama", "LlamaForCausalLM"))
