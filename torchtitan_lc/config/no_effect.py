"""Settings that do nothing in the chosen combination.

Someone who writes a key expects something of it. The run is right without it, so it is a warning
and not an error, but one that names the key and the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_lc.config import names
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.resolve import resolve_strategy


@dataclass(frozen=True)
class Row:
    """While `unused` holds, none of `keys` (`section.*`: all keys of a section) does anything."""

    unused: Callable[[JobConfig], bool]
    keys: tuple[str, ...]
    why: str


TABLE = (
    Row(
        lambda c: resolve_strategy(c) != "upipe",
        ("attention.heads_per_stage",),
        "only strategy upipe works in stages",
    ),
    Row(
        lambda c: c.activation_checkpoint.mode != "selective",
        ("activation_checkpoint.selective_layers",),
        "only mode selective keeps attention's output",
    ),
    Row(
        lambda c: c.activation_checkpoint.mode == "none",
        ("activation_checkpoint.block_inputs_every",),
        "mode none keeps everything",
    ),
    Row(
        lambda c: not c.activation_offload.enable,
        ("activation_offload.*", "debug.share_offload_buffers"),
        "activation_offload.enable is false",
    ),
    Row(
        lambda c: not c.profiling.enable_profiling,
        (
            "profiling.save_traces_folder",
            "profiling.profiler_active",
            "profiling.profiler_warmup",
        ),
        "profiling.enable_profiling is false",
    ),
    Row(
        lambda c: not (c.profiling.enable_profiling or c.profiling.enable_memory_snapshot),
        ("profiling.profile_freq",),
        "profiling.enable_profiling and enable_memory_snapshot are false",
    ),
    Row(
        lambda c: not c.profiling.enable_memory_snapshot,
        ("profiling.save_memory_snapshot_folder",),
        "profiling.enable_memory_snapshot is false",
    ),
    Row(
        lambda c: not c.metrics.enable_tensorboard,
        ("metrics.save_tb_folder",),
        "metrics.enable_tensorboard is false",
    ),
    Row(
        lambda c: not (c.metrics.enable_tensorboard or c.metrics.enable_wandb),
        ("metrics.save_for_all_ranks",),
        "metrics.enable_tensorboard and enable_wandb are false",
    ),
    Row(
        lambda c: (
            c.model.tokenizer == "byte"
            and c.model.flavor != "from_hf"
            and not c.checkpoint.initial_load_in_hf
            and not c.checkpoint.last_save_in_hf
            and not c.checkpoint.hf_interval
        ),
        ("model.hf_assets_path",),
        'model.tokenizer "byte" reads no files',
    ),
    Row(
        lambda c: c.model.rope.type == "default",
        (
            "model.rope.factor",
            "model.rope.original_max_position_embeddings",
            "model.rope.low_freq_factor",
            "model.rope.high_freq_factor",
            "model.rope.beta_fast",
            "model.rope.beta_slow",
            "model.rope.truncate",
            "model.rope.attention_factor",
            "model.rope.mscale",
            "model.rope.mscale_all_dim",
        ),
        'model.rope.type "default" does not scale',
    ),
    Row(
        lambda c: c.optimizer.name == "SGD",
        ("optimizer.beta1", "optimizer.beta2", "optimizer.eps"),
        "optimizer SGD has no such term",
    ),
    Row(
        lambda c: c.optimizer.name == "SGD",
        ("optimizer.offload_state",),
        "optimizer SGD keeps no state",
    ),
    Row(
        lambda c: c.training.enable_cpu_offload,
        ("optimizer.offload_state",),
        "training.enable_cpu_offload keeps all optimizer state on the host",
    ),
    Row(
        lambda c: c.lr_scheduler.decay_ratio == 0,
        ("lr_scheduler.decay_type", "lr_scheduler.min_lr_factor"),
        "lr_scheduler.decay_ratio 0 means no decay",
    ),
    Row(
        lambda c: c.training.dataset == "stdlib",
        ("training.dataset_path",),
        'training.dataset "stdlib" finds its own files',
    ),
    Row(lambda c: not c.compile.enable, ("compile.backend",), "compile.enable is false"),
    Row(lambda c: not c.float8.enable, ("float8.*",), "float8.enable is false"),
    Row(lambda c: not c.checkpoint.enable, ("checkpoint.*",), "checkpoint.enable is false"),
    Row(
        lambda c: c.checkpoint.enable and c.checkpoint.load_only,
        (
            "checkpoint.interval",
            "checkpoint.last_save_model_only",
            "checkpoint.last_save_in_hf",
            "checkpoint.hf_interval",
            "checkpoint.export_dtype",
            "checkpoint.async_mode",
            "checkpoint.keep_latest_k",
            "checkpoint.enable_first_step_checkpoint",
        ),
        "checkpoint.load_only saves nothing",
    ),
    Row(
        lambda c: (
            c.checkpoint.enable
            and not c.checkpoint.last_save_model_only
            and not c.checkpoint.last_save_in_hf
            and not c.checkpoint.hf_interval
        ),
        ("checkpoint.export_dtype",),
        "it applies to a last save with checkpoint.last_save_model_only and to Hugging Face exports",
    ),
    Row(
        lambda c: (
            c.checkpoint.enable
            and c.checkpoint.initial_load_path is None
            and not c.checkpoint.initial_load_in_hf
        ),
        ("checkpoint.initial_load_model_only",),
        "checkpoint.initial_load_path is not set",
    ),
)


def warn(config: JobConfig) -> list[str]:
    """One text per key that is set away from its default and does nothing, and per cut schedule."""
    defaults = JobConfig()
    reasons: dict[str, list[str]] = {}
    for row in TABLE:
        if not row.unused(config):
            continue
        for key in _expand(row.keys):
            if names.get_key(config, key) != names.get_key(defaults, key):
                reasons.setdefault(key, []).append(row.why)
    return [
        f"{key} = {names.get_key(config, key)} has no effect: {'; '.join(whys)}"
        for key, whys in reasons.items()
    ] + _cut_schedule(config)


def _expand(keys: tuple[str, ...]) -> list[str]:
    expanded = []
    for key in keys:
        section = key.removesuffix(".*")
        inside = [known for known in names.all_keys() if names.section_of(known) == section]
        expanded += inside if key.endswith(".*") else [key]
    return expanded


def _cut_schedule(config: JobConfig) -> list[str]:
    schedule, steps = config.lr_scheduler, config.training.steps
    length = steps if schedule.total_steps is None else schedule.total_steps
    texts = []
    if schedule.warmup_steps > length:
        texts.append(
            f"lr_scheduler.warmup_steps = {schedule.warmup_steps} is longer than the schedule of "
            f"{length} steps: it is cut to {length}, and nothing decays"
        )
    elif schedule.decay_ratio and schedule.warmup_steps + schedule.decay_ratio * length > length:
        texts.append(
            f"lr_scheduler.warmup_steps = {schedule.warmup_steps} and decay_ratio = "
            f"{schedule.decay_ratio} overlap in a schedule of {length} steps: the decay is cut to "
            f"the last {length - schedule.warmup_steps}"
        )
    if length < steps:
        texts.append(
            f"lr_scheduler.total_steps = {length} ends before training.steps = {steps}: the rest "
            f"runs at min_lr_factor = {schedule.min_lr_factor}"
        )
    return texts
