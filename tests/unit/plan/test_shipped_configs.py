"""The figures in train_configs/ are those of the planner as it is."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from torchtitan_lc.config.manager import load_config
from torchtitan_lc.config.validate import warn
from torchtitan_lc.plan.hardware import GIB, make_cluster
from torchtitan_lc.plan.job import PlannedModel, planned_model
from torchtitan_lc.plan.planner import Plan, make_plan

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted((ROOT / "train_configs").glob("*.toml"))
_models: dict[tuple[str, str], PlannedModel] = {}


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "plan_configs", ROOT / "scripts" / "plan_configs.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _plan(path: Path) -> Plan:
    config = load_config(["--config", str(path)], quiet=True)
    key = (config.model.name, config.model.flavor)
    if key not in _models:
        _models[key] = planned_model(config)
    return make_plan(config, _models[key], make_cluster(config.plan))


def test_those_that_were_promised_are_there() -> None:
    names = {path.stem for path in CONFIGS}
    eights = {f"llama8b_{length}" for length in ("64k", "128k", "512k", "1m", "3m", "5m", "10m")}
    others = {"debug", "llama1b_128k", "llama3b_1m", "llama3b_3m", "qwen32b_1m", "llama70b_512k"}
    assert names >= eights | others


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_carries_the_figures_of_the_planner_and_fits(path: Path) -> None:
    script, plan, text = _script(), _plan(path), path.read_text(encoding="utf-8")
    block = script.comment_block(plan)
    assert script.with_figures(text, block) == text, "run scripts/plan_configs.py"
    assert "\n".join(block) in text
    assert plan.fits, f"{plan.gpu_room / GIB:.1f} GiB"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_none_sets_a_key_that_does_nothing_or_a_time_limit_that_would_end_it(path: Path) -> None:
    plan = _plan(path)
    assert warn(plan.job.config) == []
    limits = plan.job.config.comm
    assert min(limits.init_timeout_seconds, limits.train_timeout_seconds) >= (
        2 * plan.time.longest_layer
    )


def test_figures_are_put_in_once_and_replaced() -> None:
    script = _script()
    once = script.with_figures("# What it is.\n\n[job]\n", ["# Planned for x:", "# GPU: 1"])
    assert once == "# What it is.\n\n# Planned for x:\n# GPU: 1\n\n[job]\n"
    twice = script.with_figures(once, ["# Planned for x:", "# GPU: 2", "# Host: 3"])
    assert twice == "# What it is.\n\n# Planned for x:\n# GPU: 2\n# Host: 3\n\n[job]\n"
