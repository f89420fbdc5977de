"""A config as plain numbers: what a planner needs of it, with every "auto" decided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torchtitan_lc.attention.heads import HeadPlan, plan_heads
from torchtitan_lc.attention.layout import Layout
from torchtitan_lc.attention.strategies import best_ulysses_degree
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.resolve import accumulation_steps, resolve_degrees, resolve_strategy
from torchtitan_lc.config.validate import check
from torchtitan_lc.memory.placement import (
    LayerPlacement,
    Sizes,
    host_state,
    is_roomy,
    place_layers,
    releases_cached,
)
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.models.spec import get_args, get_model, import_custom
from torchtitan_lc.plan.hardware import Cluster
from torchtitan_lc.plan.meta import built_on_meta
from torchtitan_lc.tools.dtypes import torch_dtype
from torchtitan_lc.tools.errors import UserError


@dataclass(frozen=True)
class PlannedModel:
    """args, and the module on the meta device."""

    name: str
    args: Any
    module: Decoder
    _answers: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def once(self, ask: Callable[..., Any], *case: Any) -> Any:
        """ask(*case): plans of one model ask the same again and again, as a change of one key leaves most
        of it alone. The first of ``case`` is part of this model."""
        key = (ask, *case[1:])
        if key not in self._answers:
            self._answers[key] = ask(*case)
        return self._answers[key]


@dataclass(frozen=True)
class Job:
    """One job on one cluster.

    seq_len: padded to what the ranks can cut. tokens: of a rank. dp: groups with rows of their own.
    shard: ranks over which parameters are sharded. heads: who computes what at which stage. hidden:
    bytes of one hidden-state buffer, B. layers: what each keeps, and where. roomy settings, early among
    them, are those that "auto" leaves to the size of B. host_budget: bytes of host memory that a rank may
    use for activations.
    """

    config: JobConfig
    model: PlannedModel
    cluster: Cluster
    seq_len: int
    tokens: int
    dp: int
    shard: int
    cp: int
    ulysses: int
    accumulation: int
    strategy: str
    kernel: str
    heads: HeadPlan
    dtype: torch.dtype
    hidden: int
    outputs: int
    layers: Sequence[LayerPlacement]
    hold_normed_input: bool
    sum_kv_gradients: bool
    overlap_exchange: bool
    early_fetch: bool
    release_cached: bool
    host_budget: int

    @property
    def rows(self) -> int:
        return self.config.training.local_batch_size

    @property
    def ring(self) -> int:
        return self.cp // self.ulysses

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def world(self) -> int:
        return self.cluster.gpus

    @property
    def offload(self) -> bool:
        return self.config.activation_offload.enable

    def tile(self, wanted: int) -> tuple[int, int]:
        """(tokens of each row in a tile, tiles) for a [tiling] key, as ops.tiled cuts them."""
        tokens = max(1, wanted // self.rows) if wanted > 0 else self.tokens
        tokens = min(tokens, self.tokens)
        return tokens, -(-self.tokens // tokens)


def planned_model(config: JobConfig) -> PlannedModel:
    """Raises UserError for a model that is no `Decoder`: of others only the shards could be counted."""
    import_custom(config.experimental.custom_import)
    spec = get_model(config.model.name)
    args = get_args(spec, config)
    module = built_on_meta(lambda: spec.build(args))
    if not isinstance(module, Decoder):
        raise UserError(
            f"model.name = {config.model.name!r}: a plan asks the functions of a "
            "torchtitan_lc.models.decoder.model.Decoder what they hold, and this model is none"
        )
    return PlannedModel(config.model.name, args, module)


def make_job(config: JobConfig, model: PlannedModel, cluster: Cluster) -> Job:
    """Raises UserError with every reason why the config cannot run on the cluster."""
    problems = check(config, cluster.gpus)
    if problems:
        raise UserError("\n".join(problems))
    try:
        return _make_job(config, model, cluster)
    except ValueError as error:
        raise UserError(str(error)) from error


def _make_job(config: JobConfig, model: PlannedModel, cluster: Cluster) -> Job:
    args = model.args
    replicate, shard, cp = resolve_degrees(config, cluster.gpus)
    strategy = resolve_strategy(config)
    ulysses = config.parallelism.context_parallel_ulysses_degree
    if ulysses == -1:
        ulysses = 1
        if strategy != "ring":
            ulysses = best_ulysses_degree(
                cp, args.n_heads, args.n_kv_heads, min(cluster.gpus_per_node, cluster.gpus)
            )
    per_stage = config.attention.heads_per_stage if strategy == "upipe" else None
    heads = plan_heads(args.n_heads, args.n_kv_heads, ulysses, per_stage)
    layout = Layout(ulysses, cp // ulysses)
    seq_len = -(-config.training.seq_len // layout.multiple) * layout.multiple
    tokens = seq_len // cp
    dtype = torch_dtype(config.training.mixed_precision_param)
    rows = config.training.local_batch_size
    hidden = rows * tokens * args.dim * dtype.itemsize
    outputs = rows * tokens * args.n_heads * args.head_dim * dtype.itemsize
    owned = sum(len(stage.q_heads[0]) for stage in heads.stages)
    outputs += rows * tokens * ulysses * owned * max(4, dtype.itemsize)

    offload, ac = config.activation_offload, config.activation_checkpoint
    host = 0
    if offload.enable:
        elements = parameters(model.module) // (shard * cp)
        state = host_state(config, elements * torch_dtype(config.training.dtype).itemsize)
        host = int(cluster.hardware.offload_bytes_per_gpu(cluster.gpus_per_node, state))
        if offload.host_memory_gib != "auto":
            host = int(offload.host_memory_gib * 2**30)
    layers = place_layers(
        args.n_layers,
        Sizes(hidden, outputs),
        mode=ac.mode,
        selective_layers=ac.selective_layers,
        every=ac.block_inputs_every,
        host_bytes=host,
    )
    memory = int(cluster.hardware.memory_gib * 2**30)
    roomy = is_roomy(hidden, memory)

    def decided(value: bool | str) -> bool:
        return roomy if value == "auto" else bool(value)

    return Job(
        config=config,
        model=model,
        cluster=cluster,
        seq_len=seq_len,
        tokens=tokens,
        dp=replicate * shard,
        shard=shard * cp,
        cp=cp,
        ulysses=ulysses,
        accumulation=accumulation_steps(config, replicate * shard),
        strategy=strategy,
        kernel=_kernel(config, cluster),
        heads=heads,
        dtype=dtype,
        hidden=hidden,
        outputs=outputs,
        layers=layers,
        hold_normed_input=decided(config.attention.hold_normed_input),
        sum_kv_gradients=decided(config.attention.sum_kv_gradients),
        overlap_exchange=ulysses > 1 and decided(config.attention.overlap_exchange),
        early_fetch=offload.enable and decided(offload.early_fetch),
        release_cached=releases_cached(config, hidden, memory),
        host_budget=host,
    )


def _kernel(config: JobConfig, cluster: Cluster) -> str:
    """ "auto" is the fastest that the hardware's table knows: a plan cannot see what is installed there."""
    if config.attention.kernel != "auto":
        return config.attention.kernel
    return cluster.hardware.best_kernel(torch_dtype(config.training.mixed_precision_param))


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
