"""Qwen 3 (dense): the published shapes, and the registration."""

from __future__ import annotations

from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.hf import Family
from torchtitan_lc.models.decoder.registration import register_decoder

# As in the config.json of the base models; of 32B only the chat model is published, whose 40,960 are
# 32,768 and the answer.
FLAVORS = {
    "0.6B": DecoderArgs(
        dim=1024,
        n_layers=28,
        n_heads=16,
        n_kv_heads=8,
        hidden_dim=3072,
        vocab_size=151_936,
        head_dim=128,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        max_position_embeddings=32_768,
        qk_norm=True,
        tie_embeddings=True,
    ),
    "1.7B": DecoderArgs(
        dim=2048,
        n_layers=28,
        n_heads=16,
        n_kv_heads=8,
        hidden_dim=6144,
        vocab_size=151_936,
        head_dim=128,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        max_position_embeddings=32_768,
        qk_norm=True,
        tie_embeddings=True,
    ),
    "4B": DecoderArgs(
        dim=2560,
        n_layers=36,
        n_heads=32,
        n_kv_heads=8,
        hidden_dim=9728,
        vocab_size=151_936,
        head_dim=128,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        max_position_embeddings=32_768,
        qk_norm=True,
        tie_embeddings=True,
    ),
    "8B": DecoderArgs(
        dim=4096,
        n_layers=36,
        n_heads=32,
        n_kv_heads=8,
        hidden_dim=12_288,
        vocab_size=151_936,
        head_dim=128,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        max_position_embeddings=32_768,
        qk_norm=True,
    ),
    "14B": DecoderArgs(
        dim=5120,
        n_layers=40,
        n_heads=40,
        n_kv_heads=8,
        hidden_dim=17_408,
        vocab_size=151_936,
        head_dim=128,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        max_position_embeddings=32_768,
        qk_norm=True,
    ),
    "32B": DecoderArgs(
        dim=5120,
        n_layers=64,
        n_heads=64,
        n_kv_heads=8,
        hidden_dim=25_600,
        vocab_size=151_936,
        head_dim=128,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        max_position_embeddings=40_960,
        qk_norm=True,
    ),
}

register_decoder("qwen3", FLAVORS, Family("qwen3", "Qwen3ForCausalLM", qk_norm=True))
