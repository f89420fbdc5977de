"""Llama 3: the published shapes, and the registration."""

from __future__ import annotations

import dataclasses

from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.models.decoder.parallelize import parallelize
from torchtitan_lc.models.spec import ModelSpec, register_model
from torchtitan_lc.ops.rope import Llama3Scaling
from torchtitan_lc.tools.errors import UserError

# Shapes and rope settings as in the config.json that each checkpoint is published with:
# Llama 3.1 (8B, 70B, 405B) and Llama 3.2 (1B, 3B).
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
        rope_scaling=Llama3Scaling(),
    ),
    "70B": DecoderArgs(
        dim=8192,
        n_layers=80,
        n_heads=64,
        n_kv_heads=8,
        hidden_dim=28_672,
        vocab_size=128_256,
        rope_scaling=Llama3Scaling(),
    ),
    "405B": DecoderArgs(
        dim=16_384,
        n_layers=126,
        n_heads=128,
        n_kv_heads=8,
        hidden_dim=53_248,
        vocab_size=128_256,
        rope_scaling=Llama3Scaling(),
    ),
}


def adjust(args: DecoderArgs, config: JobConfig) -> DecoderArgs:
    """Take over [model.rope]; what it leaves unset stays as the flavor has it."""
    rope = config.model.rope
    scaling = args.rope_scaling
    if rope.type == "default":
        scaling = None
    elif rope.type == "llama3" and scaling is None:
        scaling = Llama3Scaling()
    changes = {
        f.name: getattr(rope, f.name)
        for f in dataclasses.fields(Llama3Scaling)
        if getattr(rope, f.name) is not None
    }
    if changes and scaling is None:
        raise UserError(
            f"model.rope.{', model.rope.'.join(changes)} set, but this model's rope has no scaling: "
            "set model.rope.type = 'llama3' too"
        )
    if changes and scaling is not None:
        try:
            scaling = dataclasses.replace(scaling, **changes)
        except ValueError as error:
            raise UserError(f"[model.rope]: {error}") from error
    theta = args.rope_theta if rope.theta is None else rope.theta
    return dataclasses.replace(args, rope_theta=theta, rope_scaling=scaling)


register_model(
    ModelSpec(
        name="llama3",
        flavors=FLAVORS,
        build=Decoder,
        parallelize=parallelize,
        adjust=adjust,
    )
)
