"""A decoder as Hugging Face writes it down: names of tensors, and config.json.

Names only are translated: rope pairs dimensions as theirs does, so no weight is permuted. config.json is
read in both spellings of rope settings and written in the older one, which transformers 4 and 5 and other
programs read:

    transformers 4    "rope_theta": 1e6, "rope_scaling": {"rope_type" or "type": "yarn", "factor": 4.0, ...}
    transformers 5    "rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, ...}

Whatever would make their model compute something else than ours is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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

# model_type of config.json -> our `model.name`.
NAMES = {"llama": "llama3", "qwen2": "qwen2", "qwen3": "qwen3", "mistral": "mistral"}

_WHOLE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def tensor_name(parameter: str) -> str:
    """ "layers.3.attention.wq.weight" -> "model.layers.3.self_attn.q_proj.weight". KeyError for a name
    that no decoder has."""
    if parameter in _WHOLE:
        return _WHOLE[parameter]
    prefix, number, inside = parameter.split(".", 2)
    module, _, kind = inside.rpartition(".")
    if prefix != "layers":
        raise KeyError(parameter)
    return f"model.layers.{number}.{_IN_LAYER[module]}.{kind}"


@dataclass(frozen=True)
class Family:
    """What tells one model_type of Hugging Face from another.

    architecture: of config.json. qkv_bias, qk_norm: as in DecoderArgs, fixed by the model_type.
    windows: sliding_window alone decides whether there are windows (Mistral); else use_sliding_window
    has to be true too (Qwen).
    """

    model_type: str
    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: bool = False

    # -- config.json -> args

    def read_config(self, config: Mapping[str, Any]) -> DecoderArgs:
        """The args of a parsed config.json. Raises UserError for what is missing or not supported."""
        self._check_type(config)
        _refuse_unsupported(config)
        size = _Numbers(config)
        n_heads = size.whole("num_attention_heads")
        max_positions = size.whole("max_position_embeddings")
        theta, scaling = read_rope(config, max_positions)
        if isinstance(scaling, LinearScaling | DynamicScaling | YarnScaling):
            # Here the length given is the one before scaling; for YaRN it may be either.
            reach = round(scaling.factor * scaling.original_max_position_embeddings)
            max_positions = max(max_positions, reach)
        try:
            return DecoderArgs(
                dim=size.whole("hidden_size"),
                n_layers=size.whole("num_hidden_layers"),
                n_heads=n_heads,
                n_kv_heads=size.whole("num_key_value_heads", n_heads),
                hidden_dim=size.whole("intermediate_size"),
                vocab_size=size.whole("vocab_size"),
                head_dim=size.whole("head_dim", 128 if self.qk_norm else 0),
                norm_eps=size.number("rms_norm_eps", 1e-6),
                rope_theta=theta,
                rope_scaling=scaling,
                max_position_embeddings=max_positions,
                qkv_bias=self.qkv_bias,
                qk_norm=self.qk_norm,
                sliding_window=self._sliding_window(config),
                tie_embeddings=bool(config.get("tie_word_embeddings", False)),
                init_std=size.number("initializer_range", 0.02),
            )
        except ValueError as error:
            raise UserError(f"config.json: {error}") from error

    def _check_type(self, config: Mapping[str, Any]) -> None:
        model_type = config.get("model_type")
        if model_type != self.model_type:
            name = NAMES.get(str(model_type))
            fix = (
                f"set model.name = {name!r}"
                if name
                else f"supported are {', '.join(NAMES)} (experimental.custom_import can add models)"
            )
            raise UserError(
                f"config.json has model_type = {model_type!r}, but model.name = "
                f"{NAMES[self.model_type]!r} stands for {self.model_type!r}: {fix}"
            )
        architectures = config.get("architectures") or [self.architecture]
        if architectures != [self.architecture]:
            raise UserError(
                f"config.json has architectures = {architectures}: only {self.architecture} is supported"
            )

    def _sliding_window(self, config: Mapping[str, Any]) -> int | None:
        layers = config.get("layer_types")
        if layers is not None and any(kind != "full_attention" for kind in layers):
            raise UserError(
                f"config.json has layer_types {sorted(set(layers))}: only full_attention is supported"
            )
        if self.windows:
            window = config.get("sliding_window", 4096)  # as transformers has it where nobody says
            return None if window is None else _Numbers(config).whole("sliding_window", window)
        from_layer = config.get("max_window_layers", 28)
        if (
            config.get("use_sliding_window", False)
            and config.get("sliding_window") is not None
            and layers is None
            and from_layer < config["num_hidden_layers"]
        ):
            raise UserError(
                f"config.json has use_sliding_window = true with sliding_window = "
                f"{config['sliding_window']} from layer {from_layer} on: attention in windows is not "
                "supported"
            )
        return None

    # -- args -> config.json

    def write_config(self, args: DecoderArgs) -> dict[str, Any]:
        """What config.json says of shape and rope; tokens' ids and the dtype are not args."""
        theta, rope_scaling = write_rope(args)
        max_positions = args.max_position_embeddings
        if isinstance(args.rope_scaling, LinearScaling | DynamicScaling):
            max_positions = args.rope_scaling.original_max_position_embeddings
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": args.vocab_size,
            "hidden_size": args.dim,
            "intermediate_size": args.hidden_dim,
            "num_hidden_layers": args.n_layers,
            "num_attention_heads": args.n_heads,
            "num_key_value_heads": args.n_kv_heads,
            "head_dim": args.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": args.norm_eps,
            "initializer_range": args.init_std,
            "rope_theta": theta,
            "rope_scaling": rope_scaling,
            "attention_dropout": 0.0,
            "tie_word_embeddings": args.tie_embeddings,
        }
        if max_positions is not None:
            config["max_position_embeddings"] = max_positions
        if self.model_type == "llama":
            config |= {"attention_bias": False, "mlp_bias": False}
        else:
            config["sliding_window"] = args.sliding_window
        if self.qkv_bias or self.qk_norm:
            config["use_sliding_window"] = False
        return config


class _Numbers:
    """Numbers of a config.json, each checked when it is asked for."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None:
            value = default
        if type(value) is not int or (value < 1 and value != default):
            raise UserError(f"config.json has {key} = {value!r}: expected a whole number above 0")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key)
        if value is None:
            value = default
        if type(value) not in (int, float) or not value > 0:
            raise UserError(f"config.json has {key} = {value!r}: expected a number above 0")
        return float(value)


# What would change the model's arithmetic, and the values that change nothing.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "attention_dropout": (None, 0),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1),
    "rope_interleaved": (None, False),
    "original_max_position_embeddings": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
}


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    wrong = [
        f"{key} = {config[key]!r}"
        for key, harmless in _HARMLESS.items()
        if key in config and config[key] not in harmless
    ]
    if wrong:
        raise UserError(f"config.json has {', '.join(wrong)}: not supported")


# -- rope

# Rope type -> its scaling, and the keys that its object in config.json may hold.
_ROPE: dict[str, tuple[type[Any] | None, tuple[str, ...]]] = {
    "default": (None, ()),
    "linear": (LinearScaling, ("factor",)),
    "dynamic": (DynamicScaling, ("factor",)),
    "yarn": (
        YarnScaling,
        (
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "llama3": (
        Llama3Scaling,
        (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
    ),
}
_DEFAULT_THETA = 10_000.0  # transformers', for a config.json that has none


def read_rope(config: Mapping[str, Any], max_positions: int) -> tuple[float, Scaling | None]:
    """rope_theta and scaling of a config.json in either spelling. Raises UserError."""
    where, settings = _rope_object(config)
    kinds = {settings.pop(key) for key in ("rope_type", "type") if key in settings} or {"default"}
    if len(kinds) > 1:
        raise UserError(f"config.json: {where} has type and rope_type, which differ: {kinds}")
    kind = kinds.pop()
    if kind not in _ROPE:
        raise UserError(
            f"config.json: {where} has rope_type = {kind!r}; supported are {', '.join(_ROPE)}"
        )
    inside = settings.pop("rope_theta", None)
    thetas = {
        _Numbers({"rope_theta": t}).number("rope_theta", _DEFAULT_THETA)
        for t in (inside, config.get("rope_theta"))
        if t is not None
    }
    if len(thetas) > 1:
        raise UserError(
            f"config.json has two values of rope_theta, {' and '.join(map(str, sorted(thetas)))}"
        )
    theta = thetas.pop() if thetas else _DEFAULT_THETA
    if settings.pop("partial_rotary_factor", 1) != 1:
        raise UserError(f"config.json: {where} has partial_rotary_factor, which is not supported")
    scaling_class, keys = _ROPE[kind]
    unknown = [key for key in settings if key not in keys]
    if unknown:
        raise UserError(
            f"config.json: {where} of type {kind!r} has {', '.join(unknown)}, which is not supported"
        )
    if scaling_class is None:
        return theta, None
    wrong = {k: v for k, v in settings.items() if not isinstance(v, int | float)}
    if wrong:
        raise UserError(f"config.json: {where} has {wrong}: expected numbers")
    original = settings.setdefault("original_max_position_embeddings", max_positions)
    if kind == "yarn" and original > 0:
        settings.setdefault("factor", max_positions / original)
    missing = [key for key in keys if key in ("factor", "low_freq_factor", "high_freq_factor")]
    missing = [key for key in missing if key not in settings]
    if missing:
        raise UserError(f"config.json: {where} of type {kind!r} lacks {', '.join(missing)}")
    try:
        return theta, scaling_class(**settings)
    except ValueError as error:
        raise UserError(f"config.json: {where}: {error}") from error


def _rope_object(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The key under which config.json has its rope settings, and those of them that say something."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if old and new and dict(old) != dict(new):
        raise UserError(
            f"config.json has rope_scaling = {old} and rope_parameters = {new}, which say different "
            "things: keep one"
        )
    where = "rope_scaling" if old else "rope_parameters"
    settings = {k: v for k, v in (old or new or {}).items() if v is not None}
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise UserError(f"config.json: {where} per kind of layer is not supported")
    return where, settings


def write_rope(args: DecoderArgs) -> tuple[float, dict[str, Any] | None]:
    """rope_theta and rope_scaling of a config.json. NTK-aware scaling, which Hugging Face has no name
    for, is written as the theta that it amounts to."""
    scaling = args.rope_scaling
    if scaling is None:
        return args.rope_theta, None
    if isinstance(scaling, NtkScaling):
        return scaling.theta(args.rope_theta, args.head_dim), None
    for kind, (scaling_class, keys) in _ROPE.items():
        if type(scaling) is scaling_class:
            values = {key: getattr(scaling, key) for key in keys}
            return args.rope_theta, {
                "rope_type": kind,
                **{key: value for key, value in values.items() if value is not None},
            }
    raise TypeError(f"config.json has no name for {type(scaling).__name__}")
