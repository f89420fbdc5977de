"""Jobs for tests of the plan."""

from __future__ import annotations

from functools import cache
from typing import Any

from torchtitan_lc.config import names
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.plan.hardware import TABLE, Cluster
from torchtitan_lc.plan.job import PlannedModel, planned_model
from torchtitan_lc.plan.planner import Plan, make_plan


def config(settings: dict[str, Any]) -> JobConfig:
    """Llama 3 8B on 8 ranks that share a row, flash-attn-4."""
    made = JobConfig()
    defaults = {
        "model.flavor": "8B",
        "parallelism.context_parallel_degree": 8,
        "attention.kernel": "fa4",
    }
    for key, value in {**defaults, **settings}.items():
        names.set_key(made, key, value)
    return made


@cache
def model(name: str, flavor: str) -> PlannedModel:
    return planned_model(config({"model.name": name, "model.flavor": flavor}))


def cluster(hardware: str = "h100_80gb", gpus: int = 8) -> Cluster:
    return Cluster(TABLE[hardware], -(-gpus // 8), min(gpus, 8))


def plan(settings: dict[str, Any], hardware: str = "h100_80gb", gpus: int = 8) -> Plan:
    made = config(settings)
    return make_plan(made, model(made.model.name, made.model.flavor), cluster(hardware, gpus))
