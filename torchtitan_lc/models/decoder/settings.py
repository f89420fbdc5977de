"""What the config changes in a decoder's args: its rope, and the length that it is trained for."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torchtitan_lc.config.job_config import JobConfig, ModelRope
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.ops.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    Scaling,
    YarnScaling,
)
from torchtitan_lc.tools.errors import UserError

# `model.rope.type` -> its settings; the names are those of Hugging Face's rope types, which has no "ntk".
SCALINGS: dict[str, type[Any]] = {
    "linear": LinearScaling,
    "ntk": NtkScaling,
    "dynamic": DynamicScaling,
    "yarn": YarnScaling,
    "llama3": Llama3Scaling,
}


def adjust(args: DecoderArgs, config: JobConfig) -> DecoderArgs:
    """Take over [model.rope] and training.seq_len; what is unset stays as the flavor has it.

    max_position_embeddings becomes the length that the new scaling reaches or training.seq_len,
    whichever is longer: that is what the weights are then made for. Raises UserError.
    """
    seq_len = config.training.seq_len
    if args.sliding_window is not None and seq_len > args.sliding_window:
        raise UserError(
            f"training.seq_len = {seq_len} is longer than this model's sliding window of "
            f"{args.sliding_window} tokens, and no kernel here attends in windows: use at most "
            f"{args.sliding_window}, or a model without windows (sliding_window null in config.json)"
        )
    scaling = _scaling(args, config.model.rope)
    if isinstance(scaling, DynamicScaling):
        scaling = dataclasses.replace(scaling, seq_len=seq_len)
    theta = args.rope_theta if config.model.rope.theta is None else config.model.rope.theta
    return dataclasses.replace(
        args,
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=max(_reach(args, scaling) or 0, seq_len),
    )


def warnings(args: DecoderArgs, config: JobConfig) -> list[str]:
    """What the log should say about these args of a flavor under ``config``, before ``adjust``."""
    seq_len, rope = config.training.seq_len, config.model.rope
    scaling = _scaling(args, rope)
    theta = args.rope_theta if rope.theta is None else rope.theta
    reach = _reach(args, scaling)
    if reach is None:
        return []
    # What NTK-aware scaling would make of the other theta.
    grown = max(theta / args.rope_theta, 1.0) ** ((args.head_dim - 2) / args.head_dim)
    reach = int(reach * grown)
    if seq_len <= reach:
        return []
    kind = "no scaling"
    if scaling is not None:
        kind = f"type {_name(type(scaling))}, factor {scaling.factor:g}"
    enough = max(theta, args.rope_theta) * (seq_len / reach) ** (
        args.head_dim / (args.head_dim - 2)
    )
    return [
        f"training.seq_len = {seq_len} is longer than this model's rope is made for, about {reach} "
        f"tokens ({kind}, theta {theta:g}): later positions have angles that the weights have never "
        f"met. To extend the context set model.rope.theta to {_rounded_up(enough):g} or more, or "
        "model.rope.type and factor (docs/models.md)"
    ]


def _rounded_up(x: float) -> float:
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(x)) - 1)
    return math.ceil(x / unit) * unit


def _scaling(args: DecoderArgs, rope: ModelRope) -> Scaling | None:
    """The flavor's scaling with what [model.rope] says changed, or a new one of its type."""
    if rope.type == "default":
        return None
    old: Any = args.rope_scaling
    given = {
        f.name: getattr(rope, f.name)
        for f in dataclasses.fields(rope)
        if f.name not in ("theta", "type") and getattr(rope, f.name) is not None
    }
    if rope.type is None and old is None:
        if given:
            raise UserError(
                f"model.rope.{', model.rope.'.join(given)} set, but this model's rope has no "
                f"scaling: set model.rope.type too, one of {', '.join(SCALINGS)}"
            )
        return None
    kind = type(old) if rope.type is None else SCALINGS[rope.type]
    known = dataclasses.fields(kind)
    foreign = [name for name in given if name not in {f.name for f in known}]
    if foreign:
        raise UserError(
            f"model.rope.{', model.rope.'.join(foreign)} set, which rope type {_name(kind)!r} does "
            "not have: leave it out, or choose another model.rope.type"
        )
    if type(old) is kind:
        given = {f.name: getattr(old, f.name) for f in known} | given
    else:
        # A new type stretches the rows that the old one started from.
        original = args.max_position_embeddings
        if old is not None:
            original = old.original_max_position_embeddings
        if original is not None:
            given = {"original_max_position_embeddings": original} | given
    missing = [f.name for f in known if f.default is dataclasses.MISSING and f.name not in given]
    if missing:
        raise UserError(
            f"model.rope.type = {_name(kind)!r} needs model.rope.{' and model.rope.'.join(missing)}"
        )
    try:
        return kind(**given)
    except ValueError as error:
        raise UserError(f"[model.rope]: {error}") from error


def _reach(args: DecoderArgs, scaling: Scaling | None) -> int | None:
    """Longest row, in tokens, for which the flavor's rope is made once it is changed to ``scaling``;
    None where the flavor says nothing."""
    old, reach = args.rope_scaling, args.max_position_embeddings
    if scaling is None:
        if old is not None:
            reach = old.original_max_position_embeddings
    elif type(scaling) is type(old) and reach is not None:
        reach = round(reach * _product(scaling) / _product(old))
    else:
        reach = round(_product(scaling))
    return reach


def _product(scaling: Scaling) -> float:
    return scaling.original_max_position_embeddings * scaling.factor


def _name(kind: type[Any]) -> str:
    return next(name for name, cls in SCALINGS.items() if cls is kind)
