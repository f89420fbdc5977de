"""[float8] in a decoder: which products take part, and what keeps them from it."""

from __future__ import annotations

from torchtitan_lc.config.job_config import Float8, JobConfig
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.functions import LINEARS, Functions
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.ops.linear import MULTIPLE, Float8Linear

_HEAD = "head.output"  # never in float8; a filter may name it all the same, as TorchTitan's do


def use_float8(model: Decoder, config: Float8) -> None:
    """Give each block functions that multiply in float8, but for what ``filter_fqns`` names.

    Blocks with the same products share theirs, so that they are compiled once.
    """
    linear = Float8Linear(config.recipe_name, config.emulate)
    shared: dict[tuple[str, ...], Functions] = {}
    for layer, block in enumerate(model.blocks):
        names = tuple(name for name in LINEARS if not _filtered(_fqn(layer, name), config))
        if names not in shared:
            shared[names] = model.functions.with_linear(linear, names)
        block.functions = block.attention.functions = shared[names]


def float8_problems(args: DecoderArgs, config: JobConfig) -> list[str]:
    """Sides of products that float8 cannot have, and filters that name nothing."""
    float8, layers = config.float8, range(args.n_layers)
    problems = []
    known = [_fqn(layer, name) for layer in layers for name in LINEARS] + [_HEAD]
    for text in float8.filter_fqns:
        if not any(text in fqn for fqn in known):
            problems.append(
                f"float8.filter_fqns: no weight's name contains {text!r}; they are "
                f"{_fqn('N', 'wq')} (wk, wv, wo) and {_fqn('N', 'w1')} (w2, w3), N from 0 to "
                f"{args.n_layers - 1}"
            )
    # A stage works on any number of heads, so that one head must fit.
    sides = {
        "dim": (args.dim, LINEARS),
        "head_dim": (args.head_dim, ("wq", "wk", "wv", "wo")),
        "hidden_dim": (args.hidden_dim, ("w1", "w2", "w3")),
    }
    for side, (size, users) in sides.items():
        names = [
            _short(name)
            for name in users
            if any(not _filtered(_fqn(layer, name), float8) for layer in layers)
        ]
        if names and size % MULTIPLE:
            problems.append(
                f"float8.enable = true: {side} = {size} is no multiple of {MULTIPLE}, as float8 products "
                f"with {', '.join(names)} need it; name these in float8.filter_fqns"
            )
    return problems


def _fqn(layer: int | str, name: str) -> str:
    return f"layers.{layer}.{_short(name)}"


def _short(name: str) -> str:
    return f"attention.{name}" if name in ("wq", "wk", "wv", "wo") else f"feed_forward.{name}"


def _filtered(fqn: str, config: Float8) -> bool:
    return any(text in fqn for text in config.filter_fqns)
