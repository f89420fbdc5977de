"""Qwen 2.5, of model_type qwen2: the published shapes, and the registration."""

from __future__ import annotations

from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.hf import Family
from torchtitan_lc.models.decoder.registration import register_decoder

# As in the config.json of the base models.
FLAVORS = {
    "0.5B": DecoderArgs(
        dim=896,
        n_layers=24,
        n_heads=14,
        n_kv_heads=2,
        hidden_dim=4864,
        vocab_size=151_936,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        max_position_embeddings=32_768,
        qkv_bias=True,
        tie_embeddings=True,
    ),
    "1.5B": DecoderArgs(
        dim=1536,
        n_layers=28,
        n_heads=12,
        n_kv_heads=2,
        hidden_dim=8960,
        vocab_size=151_936,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        max_position_embeddings=131_072,
        qkv_bias=True,
        tie_embeddings=True,
    ),
    "3B": DecoderArgs(
        dim=2048,
        n_layers=36,
        n_heads=16,
        n_kv_heads=2,
        hidden_dim=11_008,
        vocab_size=151_936,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        max_position_embeddings=32_768,
        qkv_bias=True,
        tie_embeddings=True,
    ),
    "7B": DecoderArgs(
        dim=3584,
        n_layers=28,
        n_heads=28,
        n_kv_heads=4,
        hidden_dim=18_944,
        vocab_size=152_064,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        max_position_embeddings=131_072,
        qkv_bias=True,
    ),
    "14B": DecoderArgs(
        dim=5120,
        n_layers=48,
        n_heads=40,
        n_kv_heads=8,
        hidden_dim=13_824,
        vocab_size=152_064,
        norm_eps=1e-5,
        rope_theta=1_000_000.0,
        max_position_embeddings=131_072,
        qkv_bias=True,
    ),
    "32B": DecoderArgs(
        dim=5120,
        n_layers=64,
        n_heads=40,
        n_kv_heads=8,
        hidden_dim=27_648,
        vocab_size=152_064,
        norm_eps=1e-5,
        rope_theta=1_000_000.0,
        max_position_embeddings=131_072,
        qkv_bias=True,
    ),
    "72B": DecoderArgs(
        dim=8192,
        n_layers=80,
        n_heads=64,
        n_kv_heads=8,
        hidden_dim=29_568,
        vocab_size=152_064,
        norm_eps=1e-5,
        rope_theta=1_000_000.0,
        max_position_embeddings=131_072,
        qkv_bias=True,
    ),
}

register_decoder("qwen2", FLAVORS, Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True))
