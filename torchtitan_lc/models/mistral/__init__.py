"""Mistral without sliding windows: the published shapes, and the registration."""

from __future__ import annotations

from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.hf import Family
from torchtitan_lc.models.decoder.registration import register_decoder

# As in the config.json of Mistral 7B v0.3 and of Mistral Nemo's base model.
FLAVORS = {
    "7B": DecoderArgs(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        hidden_dim=14_336,
        vocab_size=32_768,
        rope_theta=1_000_000.0,
        max_position_embeddings=32_768,
    ),
    "Nemo-12B": DecoderArgs(
        dim=5120,
        n_layers=40,
        n_heads=32,
        n_kv_heads=8,
        hidden_dim=14_336,
        vocab_size=131_072,
        head_dim=128,
        rope_theta=1_000_000.0,
        max_position_embeddings=128_000,
    ),
}

register_decoder("mistral", FLAVORS, Family("mistral", "MistralForCausalLM", windows=True))
