"""The fastest configuration that fits, and the longest row: by planning every sensible one.

    how attention is spread      strategy, Ulysses x ring, heads per stage
    what blocks keep, and where  selective or full, offload, block inputs
    what else saves memory       state on the host, tiles, buffers that buy time: each from the fastest to the
                                 leanest

What goes further in each of the last takes no less time, so beyond something that fits nothing is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.plan.changes import Settings, changed
from torchtitan_lc.plan.hardware import Cluster
from torchtitan_lc.plan.job import PlannedModel
from torchtitan_lc.plan.planner import Plan, make_plan
from torchtitan_lc.tools.errors import UserError

STEP = 128 * 1024  # tokens to which the longest row is found

_BUYS_TIME = (
    "attention.hold_normed_input",
    "attention.sum_kv_gradients",
    "attention.overlap_exchange",
    "activation_offload.early_fetch",
)
_ON_GPU: Settings = {"optimizer.offload_state": False, "training.enable_cpu_offload": False}
_KEPT: Settings = {"activation_checkpoint.mode": "selective", "activation_offload.enable": False}
# What blocks keep, and where: no order, as fewer block inputs in host memory leave it room for more of
# attention's outputs, which saves more time than making those inputs again takes.
KEPT: tuple[Settings, ...] = tuple(
    {**kept, "activation_checkpoint.block_inputs_every": every}
    for kept in (
        _KEPT,
        {**_KEPT, "activation_offload.enable": True},
        {**_KEPT, "activation_checkpoint.mode": "full"},
    )
    for every in (1, 2, 4, 8)
)
# Each from the fastest to the leanest.
MEASURES: tuple[tuple[Settings, ...], ...] = (
    (_ON_GPU, {**_ON_GPU, "optimizer.offload_state": True},
     {**_ON_GPU, "training.enable_cpu_offload": True}),
    tuple(
        {"tiling.projection_tokens": p, "tiling.mlp_tokens": m, "tiling.loss_tokens": head}
        for p, m, head in ((16384, 16384, 4096), (16384, 4096, 2048), (8192, 2048, 1024))
    ),
    (dict.fromkeys(_BUYS_TIME, "auto"), dict.fromkeys(_BUYS_TIME, False)),
)  # fmt: skip


def fastest(
    config: JobConfig,
    model: PlannedModel,
    cluster: Cluster,
    among: Iterable[Settings] | None = None,
) -> Plan | None:
    """The plan with most tokens/s that fits; None where none does. ``among``: of all `spreads`, if not said.

    Keeps the model, the rows and all else of ``config``; a context_parallel_degree of 1 there stands for all
    GPUs.
    """
    best: Plan | None = None
    for spread in spreads(config, model, cluster) if among is None else among:
        for plan in _fitting(config, spread, model, cluster):
            if best is None or plan.tokens_per_second > best.tokens_per_second:
                best = plan
    return best


def longest(config: JobConfig, model: PlannedModel, cluster: Cluster) -> Plan | None:
    """The fastest plan for the longest row that fits, to `STEP` tokens."""

    def fits(steps: int) -> bool:
        at = changed(config, {"training.seq_len": steps * STEP})
        return any(plan.fits for plan in _leanest(at, model, cluster))

    if not fits(1):
        return None
    most = 1
    while fits(2 * most):
        most *= 2
    step = most // 2
    while step:
        if fits(most + step):
            most += step
        step //= 2
    return fastest(changed(config, {"training.seq_len": most * STEP}), model, cluster)


def spreads(config: JobConfig, model: PlannedModel, cluster: Cluster) -> Iterator[Settings]:
    """Strategies with every split of the ranks that share a row into Ulysses and ring."""
    cp = config.parallelism.context_parallel_degree
    cp = cluster.gpus if cp == 1 else cp
    heads = model.args.n_heads
    for ulysses in range(1, min(cp, heads) + 1):
        if cp % ulysses:
            continue
        common: Settings = {
            "parallelism.context_parallel_degree": cp,
            "parallelism.context_parallel_ulysses_degree": ulysses,
        }
        if ulysses == 1:
            yield {**common, "attention.strategy": "local" if cp == 1 else "ring"}
            continue
        yield {**common, "attention.strategy": "ulysses"}
        owned, per_stage = -(-heads // ulysses), 1
        while per_stage < owned:
            yield {**common, "attention.strategy": "upipe", "attention.heads_per_stage": per_stage}
            per_stage *= 2


def _fitting(
    config: JobConfig, spread: Settings, model: PlannedModel, cluster: Cluster
) -> Iterator[Plan]:
    """Plans that fit; of one way of keeping, none that goes further in every measure than another."""
    every_place = list(product(*(range(len(measure)) for measure in MEASURES)))
    for kept in KEPT:
        if not any(plan.fits for plan in _lean(config, {**spread, **kept}, model, cluster)):
            continue
        found: list[tuple[int, ...]] = []
        for places in sorted(every_place, key=sum):
            if any(all(a <= b for a, b in zip(less, places, strict=True)) for less in found):
                continue
            plan = _plan(config, {**spread, **kept}, places, model, cluster)
            if plan is not None and plan.fits:
                found.append(places)
                yield plan


def _leanest(config: JobConfig, model: PlannedModel, cluster: Cluster) -> Iterator[Plan]:
    """Of each split, the stages with one head."""
    for spread in spreads(config, model, cluster):
        if spread["attention.strategy"] == "upipe" and spread["attention.heads_per_stage"] > 1:
            continue
        for kept in KEPT:
            yield from _lean(config, {**spread, **kept}, model, cluster)


def _lean(
    config: JobConfig, settings: Settings, model: PlannedModel, cluster: Cluster
) -> Iterator[Plan]:
    """With the leanest tiles and buffers, and model state in each place."""
    ends = [len(measure) - 1 for measure in MEASURES[1:]]
    for state in range(len(MEASURES[0])):
        plan = _plan(config, settings, (state, *ends), model, cluster)
        if plan is not None:
            yield plan


def _plan(
    config: JobConfig,
    settings: Settings,
    places: tuple[int, ...],
    model: PlannedModel,
    cluster: Cluster,
) -> Plan | None:
    settings = {"attention.heads_per_stage": 1, **settings}
    for measure, place in zip(MEASURES, places, strict=True):
        settings |= measure[place]
    try:
        return make_plan(changed(config, settings), model, cluster)
    except UserError:
        return None  # a split that this model cannot have
