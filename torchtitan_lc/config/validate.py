"""Rules that join settings to one another and to the number of ranks: one function per rule.

No process group, no torch, no model, no files: what can be said of the settings alone. What a part
knows of its own (a kernel its dtypes, a strategy its row lengths, a source its files) is asked of that
part by preflight.py and not said here again. `check` reports every failure at once; `warn`
(no_effect.py) is for what is allowed but does nothing.
"""

import math
from collections.abc import Callable, Iterator

from torchtitan_lc.config import names
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.no_effect import warn
from torchtitan_lc.config.resolve import accumulation_steps, resolve_degrees, resolve_strategy

__all__ = ["accumulation_steps", "check", "resolve_degrees", "resolve_strategy", "warn"]

AT_LEAST_ONE = (
    "profiling.profile_freq",
    "profiling.profiler_active",
    "metrics.log_freq",
    "training.local_batch_size",
    "training.seq_len",
    "training.steps",
    "training.gc_freq",
    "attention.heads_per_stage",
    "activation_checkpoint.block_inputs_every",
    "checkpoint.interval",
    "comm.init_timeout_seconds",
    "comm.train_timeout_seconds",
)
AT_LEAST_ZERO = (
    "profiling.profiler_warmup",
    "optimizer.weight_decay",
    "lr_scheduler.warmup_steps",
    "tiling.projection_tokens",
    "tiling.mlp_tokens",
    "tiling.loss_tokens",
    "checkpoint.keep_latest_k",
    "checkpoint.hf_interval",
    "comm.trace_buf_size",
    "debug.seed",
)
ABOVE_ZERO = ("optimizer.lr", "optimizer.eps", "training.max_norm", "model.rope.theta")


def check(config: JobConfig, world_size: int) -> list[str]:
    """All that keeps `config` from running on `world_size` ranks; [] if nothing.

    Each text names the keys, their values and the fix.
    """
    problems = list(_degrees(config, world_size))
    for rule in _RULES:
        problems += rule(config)
    return problems


def _degrees(config: JobConfig, world_size: int) -> Iterator[str]:
    try:
        replicate, shard, _ = resolve_degrees(config, world_size)
    except ValueError as error:
        yield str(error)
        return
    if config.training.local_batch_size < 1:
        return  # reported by _minimum
    try:
        accumulation_steps(config, replicate * shard)
    except ValueError as error:
        yield str(error)


def _minimum(config: JobConfig) -> Iterator[str]:
    """NaN fails these comparisons too, as they ask for what is right."""
    for keys, bound in ((AT_LEAST_ONE, 1), (AT_LEAST_ZERO, 0)):
        for key in keys:
            value = names.get_key(config, key)
            if not value >= bound:
                yield f"{key} = {value}: must be at least {bound}"
    for key in ABOVE_ZERO:
        value = names.get_key(config, key)
        if value is not None and not value > 0:
            yield f"{key} = {value}: must be above 0"


def _ulysses_degree(config: JobConfig) -> Iterator[str]:
    cp = config.parallelism.context_parallel_degree
    ulysses = config.parallelism.context_parallel_ulysses_degree
    if ulysses != -1 and (ulysses < 1 or cp % ulysses):
        fits = ", ".join(str(d) for d in range(1, cp + 1) if cp % d == 0)
        yield (
            f"parallelism.context_parallel_ulysses_degree = {ulysses} does not divide "
            f"context_parallel_degree = {cp}, the ranks that share a row: use -1 or one of {fits}"
        )


def _offload(config: JobConfig) -> Iterator[str]:
    offload = config.activation_offload
    if offload.enable and config.activation_checkpoint.mode == "none":
        yield (
            'activation_offload.enable = true with activation_checkpoint.mode = "none": only what a '
            'checkpointed block keeps is offloaded; set mode to "selective" or "full"'
        )
    if offload.host_memory_gib != "auto" and not 0 < offload.host_memory_gib < math.inf:
        yield (
            f"activation_offload.host_memory_gib = {offload.host_memory_gib}: must be above 0, or "
            '"auto"; activation_offload.enable = false uses none'
        )


def _float8(config: JobConfig) -> Iterator[str]:
    dtype = config.training.mixed_precision_param
    if config.float8.enable and not config.float8.emulate and dtype != "bfloat16":
        yield (
            f'float8.enable = true with training.mixed_precision_param = "{dtype}": float8 products give '
            'bf16; set mixed_precision_param to "bfloat16"'
        )


def _schedule(config: JobConfig) -> Iterator[str]:
    schedule = config.lr_scheduler
    if schedule.total_steps is not None and schedule.total_steps < 1:
        yield f"lr_scheduler.total_steps = {schedule.total_steps}: must be at least 1, or left out"
    if schedule.decay_ratio is not None and not 0 <= schedule.decay_ratio <= 1:
        yield f"lr_scheduler.decay_ratio = {schedule.decay_ratio}: must lie in 0 to 1"
    if not 0 <= schedule.min_lr_factor <= 1:
        yield (
            f"lr_scheduler.min_lr_factor = {schedule.min_lr_factor}: a share of optimizer.lr, so "
            "it must lie in 0 to 1"
        )


def _optimizer(config: JobConfig) -> Iterator[str]:
    for key in ("optimizer.beta1", "optimizer.beta2"):
        beta = names.get_key(config, key)
        if not 0 <= beta < 1:
            yield f"{key} = {beta}: must be at least 0 and below 1"
    for key in ("optimizer.lr", "optimizer.eps", "optimizer.weight_decay"):
        if math.isinf(names.get_key(config, key)):
            yield f"{key} = inf: must be finite"


def _rope(config: JobConfig) -> Iterator[str]:
    length = config.model.rope.original_max_position_embeddings
    if length is not None and length < 1:
        yield f"model.rope.original_max_position_embeddings = {length}: must be at least 1"


def _profiling(config: JobConfig) -> Iterator[str]:
    profiling = config.profiling
    needed = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and 1 <= profiling.profile_freq < needed:
        yield (
            f"profiling.profile_freq = {profiling.profile_freq} leaves no room for profiler_warmup "
            f"{profiling.profiler_warmup} + profiler_active {profiling.profiler_active}: use "
            f"{needed} or more"
        )


def _checkpoint(config: JobConfig) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.keep_latest_k == 1:
        yield (
            "checkpoint.keep_latest_k = 1: a crash while the only checkpoint is replaced would "
            "leave none; use 2 or more, or 0 to keep all"
        )
    if checkpoint.load_step < -1:
        yield f"checkpoint.load_step = {checkpoint.load_step}: a step, or -1 for the newest"
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        yield (
            "checkpoint.initial_load_model_only = false with initial_load_in_hf = true: a Hugging Face "
            "folder holds weights only; leave initial_load_model_only at true"
        )
    if checkpoint.enable:
        return
    # Unlike the keys of `warn`, leaving these aside would train from other weights than asked for.
    needs_enable = {
        "load_step": checkpoint.load_step != -1,
        "initial_load_path": checkpoint.initial_load_path is not None,
        "initial_load_in_hf": checkpoint.initial_load_in_hf,
        "load_only": checkpoint.load_only,
    }
    for name, is_set in needs_enable.items():
        if is_set:
            value = getattr(checkpoint, name)
            yield f"checkpoint.{name} = {value} loads only with checkpoint.enable = true"
    # And these would train to the end without what was asked for. Not interval and the like, which a
    # config holds for the runs that do save.
    asks_to_save = {
        "last_save_in_hf": checkpoint.last_save_in_hf,
        "hf_interval": checkpoint.hf_interval > 0,
        "last_save_model_only": checkpoint.last_save_model_only,
    }
    for name, is_set in asks_to_save.items():
        if is_set:
            value = getattr(checkpoint, name)
            yield (
                f"checkpoint.{name} = {value} with checkpoint.enable = false: the run would end with "
                f"nothing saved; set checkpoint.enable to true, or leave {name} out"
            )


def _dry_run(config: JobConfig) -> Iterator[str]:
    dry_run = config.dry_run
    if dry_run.steps < 2:
        yield (
            f"dry_run.steps = {dry_run.steps}: must be at least 2, as the first one makes the "
            "optimizer's state"
        )
    if dry_run.memory_limit_gib != "auto" and not 0 < dry_run.memory_limit_gib < math.inf:
        yield f'dry_run.memory_limit_gib = {dry_run.memory_limit_gib}: must be above 0, or "auto"'


def _folders(config: JobConfig) -> Iterator[str]:
    for key in ("job.dump_folder", "checkpoint.folder"):
        if not names.get_key(config, key).strip():
            yield f"{key} is empty: give a folder name"


def _seed(config: JobConfig) -> Iterator[str]:
    if config.debug.seed >= 2**63:
        yield f"debug.seed = {config.debug.seed}: must be below 2**63"


_RULES: tuple[Callable[[JobConfig], Iterator[str]], ...] = (
    _minimum,
    _ulysses_degree,
    _offload,
    _float8,
    _schedule,
    _optimizer,
    _rope,
    _profiling,
    _checkpoint,
    _dry_run,
    _folders,
    _seed,
)
