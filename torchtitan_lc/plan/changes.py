"""The cheapest changes of a config that make a job fit, each priced by planning it.

One key at a time first; when no single change is enough, the cheapest so far is kept and the search goes on
from there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan_lc.config import names
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.values import toml_item
from torchtitan_lc.plan.hardware import GIB, Cluster
from torchtitan_lc.plan.job import PlannedModel
from torchtitan_lc.plan.planner import Plan, make_plan
from torchtitan_lc.tools.errors import UserError

Settings = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """Keys with their new values, and the plan that they lead to; ``before`` is the plan without them."""

    settings: Settings
    before: Plan
    after: Plan

    def __str__(self) -> str:
        config = self.before.job.config
        keys = ", ".join(
            f"{key} {toml_item(names.get_key(config, key))} -> {toml_item(value)}"
            for key, value in self.settings.items()
        )
        saved = (self.after.gpu_bytes - self.before.gpu_bytes) / GIB
        host = (self.after.host.total - self.before.host.total) / GIB
        time = 100 * (self.after.time.seconds / self.before.time.seconds - 1)
        on_host = f", {host:+.0f} GiB per host" if abs(host) >= 0.5 else ""
        return f"{keys}: {saved:+.1f} GiB{on_host}, {time:+.1f} % time"


def changed(config: JobConfig, settings: Settings) -> JobConfig:
    """A copy with other values under dotted keys."""
    config = copy.deepcopy(config)
    for key, value in settings.items():
        names.set_key(config, key, value)
    return config


def cheapest(plan: Plan, model: PlannedModel, cluster: Cluster, most: int = 6) -> list[Change]:
    """Changes that, made one after another, make the plan fit; [] where it fits, or where nothing does.
    The last one's plan fits."""
    steps: list[Change] = []
    while not plan.fits and len(steps) < most:
        found = [
            change
            for change in _single(plan, model, cluster)
            if _shortfall(change.after) < _shortfall(plan)
        ]
        if not found:
            return []
        enough = [change for change in found if change.after.fits]
        if enough:
            steps.append(min(enough, key=lambda c: c.after.time.seconds))
        else:
            # The most bytes saved for the time that they cost.
            steps.append(max(found, key=lambda c: _worth(plan, c)))
        plan = steps[-1].after
    return steps if plan.fits else []


def alternatives(plan: Plan, model: PlannedModel, cluster: Cluster) -> list[Change]:
    """Single changes that are enough by themselves, fastest first."""
    found = [change for change in _single(plan, model, cluster) if change.after.fits]
    return sorted(found, key=lambda change: change.after.time.seconds)


def _shortfall(plan: Plan) -> int:
    """Bytes that are missing on one GPU and in its share of the host."""
    host = -min(0, plan.host_room) // plan.job.cluster.gpus_per_node
    return -min(0, plan.gpu_room) + host


def _worth(plan: Plan, change: Change) -> float:
    saved = _shortfall(plan) - _shortfall(change.after)
    slower = change.after.time.seconds / plan.time.seconds - 1
    return saved / max(slower, 1e-3)


def _single(plan: Plan, model: PlannedModel, cluster: Cluster) -> Iterator[Change]:
    config = plan.job.config
    for settings in candidates(plan):
        try:
            after = make_plan(changed(config, settings), model, cluster)
        except UserError:
            continue  # a value that this job cannot have is no proposal
        yield Change(settings, plan, after)


def candidates(plan: Plan) -> Iterator[Settings]:
    """Settings that hold less, one measure each."""
    job, config = plan.job, plan.job.config
    if job.strategy != "upipe" and job.ulysses > 1:
        yield {"attention.strategy": "upipe", "attention.heads_per_stage": 1}
    if job.strategy == "upipe" and job.heads.heads_per_stage > 1:
        yield {"attention.heads_per_stage": job.heads.heads_per_stage // 2}
        yield {"attention.heads_per_stage": 1}
    if job.hold_normed_input:
        yield {"attention.hold_normed_input": False}
    if job.sum_kv_gradients and job.strategy == "upipe":
        yield {"attention.sum_kv_gradients": False}
    if job.overlap_exchange and len(job.heads.stages) > 1:
        yield {"attention.overlap_exchange": False}
    if job.early_fetch:
        yield {"activation_offload.early_fetch": False}
    if not config.activation_offload.enable and config.activation_checkpoint.mode != "none":
        yield {"activation_offload.enable": True}
    mode = config.activation_checkpoint.mode
    if mode == "none":
        yield {"activation_checkpoint.mode": "selective"}
    if mode == "selective":
        n = sum(layer.mode == "selective" for layer in job.layers)
        for fewer in (3 * n // 4, n // 2, n // 4):
            yield {"activation_checkpoint.selective_layers": fewer}
        yield {"activation_checkpoint.mode": "full"}
    every = config.activation_checkpoint.block_inputs_every
    if mode != "none" and every > 1:
        # Less of the GPU, more of the host.
        yield {"activation_checkpoint.block_inputs_every": every // 2}
    if mode != "none" and every < 4:
        yield {"activation_checkpoint.block_inputs_every": 2 * every}
    for key, least in (("mlp", 2048), ("projection", 2048), ("loss", 512)):
        tokens = names.get_key(config, f"tiling.{key}_tokens")
        tile = min(tokens or job.tokens, job.tokens)
        if tile > least:
            yield {f"tiling.{key}_tokens": max(least, _power_below(tile // 2))}
    if not config.optimizer.offload_state and config.optimizer.name != "SGD":
        yield {"optimizer.offload_state": True}
    if not config.training.enable_cpu_offload:
        yield {"training.enable_cpu_offload": True}
    if config.parallelism.fsdp_reshard_after_forward != "always":
        yield {"parallelism.fsdp_reshard_after_forward": "always"}
    if config.training.local_batch_size > 1:
        yield {"training.local_batch_size": config.training.local_batch_size // 2}


def _power_below(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)
