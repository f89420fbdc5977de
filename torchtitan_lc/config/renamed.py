"""Names that TorchTitan (v0.1 to v0.2.2) and the Untied-Ulysses fork have and we do not.

MOVED   the same meaning under another name: accepted, with a notice.
GONE    no counterpart, or one with another meaning: refused with the way to say it here. A value
        that switches the thing off says what we do anyway and is accepted, with a notice, so that
        `tensor_parallel_degree = 1` in a TorchTitan file does no harm.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gone:
    """Why a name is refused, and the values (as lower-case text) under which it is harmless.

    A whole section is harmless while its `enable` (once `enabled`) is false, as it is by default.
    """

    advice: str
    harmless: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What became of an old name: `key` is where its value goes now, None if nowhere; one of
    `notice` and `problem` says so. All three empty: not an old name."""

    key: str | None = None
    notice: str = ""
    problem: str = ""


MOVED = {
    "job.print_args": "job.print_config",
    "model.tokenizer_path": "model.hf_assets_path",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.batch_size": "training.local_batch_size",
    "activation_checkpoint.offloading": "activation_offload.enable",
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
}

_OFF = ("false",)
_EMPTY = ("", "[]")
_ONE = ("1",)
_TENSOR = (
    "tensor parallelism is not offered: parameters are spread by parallelism."
    "data_parallel_shard_degree, tokens by parallelism.context_parallel_degree"
)
_PIPELINE = "pipeline parallelism is not offered: " + _TENSOR.partition(": ")[2]
_EXPERT = "expert parallelism is not offered: the models here are dense"
_CONVERTERS = "model converters are not offered; for float8 say float8.enable = true"
_GATHER = "weights are gathered in training.mixed_precision_param and cast where they are used"
_EXTRA_SECTIONS = (
    "extra sections are not offered; a model can be added through experimental.custom_import"
)
_FORK_ATTENTION = (
    "this one string held several decisions; say attention.strategy (local, ulysses, upipe, ring), "
    "attention.kernel, and for tiles the section [tiling]"
)

GONE = {
    "job.use_for_integration_test": Gone("it has no use here", _OFF),
    "job.save_config_file": Gone("the resolved config is always saved in job.dump_folder"),
    "job.custom_config_module": Gone(_EXTRA_SECTIONS, _EMPTY),
    "experimental.custom_args_module": Gone(_EXTRA_SECTIONS, _EMPTY),
    "model.converters": Gone(_CONVERTERS, _EMPTY),
    "model.print_after_conversion": Gone(_CONVERTERS, _OFF),
    "model.attn_impl": Gone(_FORK_ATTENTION),
    "model.ring_comm_heads": Gone(
        "a ring passes the KV heads of a stage: see attention.heads_per_stage"
    ),
    "optimizer.fused": Gone('say optimizer.implementation = "fused"'),
    "optimizer.early_step_in_backward": Gone(
        "the step needs the global gradient norm, so it comes after backward", _OFF
    ),
    "training.gc_debug": Gone("it is not offered", _OFF),
    "training.chunked_loss": Gone(
        "say tiling.loss_tokens: the tokens of a tile, 0 for one tile (4096 by default)"
    ),
    "training.pretrained_checkpoint_path": Gone(
        "say checkpoint.initial_load_path, with checkpoint.enable = true"
    ),
    "parallelism.tensor_parallel_degree": Gone(_TENSOR, _ONE),
    "parallelism.disable_loss_parallel": Gone(_TENSOR, ("true", "false")),
    "parallelism.enable_async_tensor_parallel": Gone(_TENSOR, _OFF),
    "parallelism.pipeline_parallel_degree": Gone(_PIPELINE, _ONE),
    "parallelism.expert_parallel_degree": Gone(_EXPERT, _ONE),
    "parallelism.expert_tensor_parallel_degree": Gone(_EXPERT, _ONE),
    "parallelism.expert_parallel_comm_backend": Gone(_EXPERT, ("standard",)),
    "parallelism.enable_compiled_autograd": Gone("it is not offered", _OFF),
    "parallelism.context_parallel_rotate_method": Gone(
        "K and V go round the ring from neighbour to neighbour; there is no other way to choose"
    ),
    "parallelism.context_parallel_load_balancer": Gone(
        "a ring is always laid in zigzag, and exchanging heads gives every rank the same work",
        ("none", ""),
    ),
    "checkpoint.initial_load_in_hf_quantized": Gone(
        "quantized weights are not read: dequantize them first, then checkpoint.initial_load_in_hf",
        _OFF,
    ),
    "checkpoint.create_seed_checkpoint": Gone(
        "no seed checkpoint is needed: debug.seed gives the same weights on any number of ranks",
        _OFF,
    ),
    "checkpoint.enable_ft_dataloader_checkpoints": Gone(
        "TorchFT is not offered", ("true", "false")
    ),
    "activation_checkpoint.selective_ac_option": Gone(
        "mode selective keeps attention's output in every layer, or in the last "
        "activation_checkpoint.selective_layers"
    ),
    "activation_checkpoint.memory_budget": Gone('say mode = "selective" or "full"'),
    "activation_checkpoint.visualize_memory_budget_pareto": Gone("it is not offered", _OFF),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Gone(
        "mode selective saves attention only", (*_EMPTY, "['moe.router.gate']", "moe.router.gate")
    ),
    "activation_checkpoint.early_stop": Gone("it is not offered", _OFF),
    "activation_checkpoint.preserve_rng_state": Gone(
        "the models here draw no random numbers in forward", ("true", "false")
    ),
    "activation_checkpoint.determinism_check": Gone("it is not offered", ("default",)),
    "activation_checkpoint.debug": Gone("it is not offered", _OFF),
    "compile.components": Gone(
        "compile.enable compiles the tile functions of model and loss together",
        ("['model', 'loss']", "model,loss"),
    ),
    "float8.enable_fsdp_float8_all_gather": Gone(_GATHER, _OFF),
    "float8.precompute_float8_dynamic_scale_for_fsdp": Gone(_GATHER, _OFF),
    "float8.force_recompute_fp8_weight_in_bwd": Gone(
        "backward casts weights again, always", ("true", "false")
    ),
    "float8.moe_fqns_prototype": Gone(_EXPERT, _EMPTY),
    "comm.save_traces_folder": Gone("it is not offered", ("comm_traces",)),
    "comm.save_traces_file_prefix": Gone("it is not offered", ("rank_",)),
    "comm.mode": Gone("for one rank on a fake process group use --dry_run", ("default",)),
    "debug.deterministic_warn_only": Gone("debug.deterministic raises, always", _OFF),
    "debug.moe_force_load_balance": Gone(_EXPERT, _OFF),
}

# A [quantize] section alone changes nothing in TorchTitan either: model.converters switches it on.
_MX = "mx training is not offered"
GONE_SECTIONS = {
    "mx": Gone(_MX),
    "quantize": Gone(
        "float8 is a section here: float8.enable, float8.recipe_name, float8.filter_fqns; " + _MX
    ),
    "memory_estimation": Gone("it is not offered"),
    "fault_tolerance": Gone("TorchFT is not offered; a run continues by the same command"),
    "validation": Gone("evaluation during training is not offered"),
    "training.dataloader": Gone("the loader has no settings of its own"),
}

_PIPELINE_PREFIXES = ("parallelism.pipeline_parallel_", "parallelism.module_fqns_per_model_part")
_NO_EFFECT_THERE = "had no effect without pipeline parallelism, and has none here"


def look_up(key: str, value: Any) -> Verdict:
    """The verdict on the dotted `key` with `value` (parsed TOML, or command-line text)."""
    if key in MOVED:
        return Verdict(MOVED[key], notice=f"is now called {MOVED[key]}; taken as that")
    gone = GONE.get(key) or _section_gone(key)
    if gone is None and key.startswith(_PIPELINE_PREFIXES):
        return Verdict(notice=_NO_EFFECT_THERE)
    if gone is None:
        return Verdict()
    if isinstance(value, dict) and not value.get("enable", value.get("enabled", False)):
        return Verdict(notice=f"has no effect: {gone.advice}")
    if str(value).lower() in gone.harmless:
        return Verdict(notice=f"is not a setting here and, as {value!r}, not needed: {gone.advice}")
    return Verdict(problem=f"is not a setting here: {gone.advice}")


def _section_gone(key: str) -> Gone | None:
    parts = key.split(".")
    prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return next((GONE_SECTIONS[prefix] for prefix in prefixes if prefix in GONE_SECTIONS), None)
