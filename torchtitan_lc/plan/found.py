"""What a search has found, said and written as a TOML that a job can be started with."""

from __future__ import annotations

import copy
from pathlib import Path

from torchtitan_lc.config import names
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.values import toml_item
from torchtitan_lc.plan.hardware import Cluster
from torchtitan_lc.plan.job import PlannedModel
from torchtitan_lc.plan.planner import Plan
from torchtitan_lc.plan.report import comment_block, long_enough, tokens
from torchtitan_lc.plan.search import fastest, longest

_FASTEST, _LONGEST = "plan_fastest.toml", "plan_longest.toml"


def search(config: JobConfig, model: PlannedModel, cluster: Cluster) -> bool:
    """Write and print the fastest plan for the config's rows and that for the longest rows; whether the
    first exists."""
    # Nothing is printed before all is written: the reader may be `head`, and leave.
    fast = fastest(config, model, cluster)
    long = longest(config, model, cluster)
    folder = Path(config.job.dump_folder)
    for plan, name in ((fast, _FASTEST), (long, _LONGEST)):
        if plan is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(as_toml(plan), encoding="utf-8")

    length = tokens(config.training.seq_len)
    if fast is None:
        print(f"No configuration fits rows of {length} tokens.")
    else:
        print(f"The fastest configuration for rows of {length} tokens:")
        _say(fast, config, folder / _FASTEST)
    if long is None:
        print("No configuration fits rows of any length.")
    else:
        found = tokens(long.job.config.training.seq_len)
        print(f"The longest rows that fit, of {found} tokens, at their fastest:")
        _say(long, config, folder / _LONGEST)
    return fast is not None


def _say(plan: Plan, asked: JobConfig, path: Path) -> None:
    for key, value in _settings(plan).items():
        if value != names.get_key(asked, key):
            print(f"  {key} = {toml_item(value)}")
    for line in comment_block(plan):
        print(f"  {line.removeprefix('# ')}")
    print(f"  written to {path}")


def as_toml(plan: Plan) -> str:
    """The settings of a plan that are not the defaults, under its figures."""
    lines = comment_block(plan)
    section = None
    for key, value in _settings(plan).items():
        if names.section_of(key) != section:
            section = names.section_of(key)
            lines += ["", f"[{section}]"]
        lines.append(f"{key.rpartition('.')[2]} = {toml_item(value)}")
    return "\n".join(lines) + "\n"


def _settings(plan: Plan) -> dict[str, object]:
    """Not those that say where the config came from or that it is to be planned; time limits that the job's
    layers keep."""
    defaults, config = JobConfig(), copy.deepcopy(plan.job.config)
    for key, seconds in long_enough(plan).items():
        names.set_key(config, key, seconds)
    keys = [key for section in names.all_sections() for key in names.all_keys()
            if names.section_of(key) == section]  # fmt: skip
    passed_over = {"job.config_file", "plan.enable", "plan.search", "plan.ladder"}
    return {
        key: names.get_key(config, key)
        for key in keys
        if key not in passed_over and names.get_key(config, key) != names.get_key(defaults, key)
    }
