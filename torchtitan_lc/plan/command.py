"""`--plan` and its relatives: what the launcher does instead of starting workers."""

from __future__ import annotations

from pathlib import Path

from torchtitan_lc.config.job_config import JobConfig

FITS, DOES_NOT_FIT = 0, 3


def run(config: JobConfig) -> int:
    """Print the plan; the exit code. Raises UserError for a config that could run on no such cluster."""
    # torch is loaded only now, so that --help answers at once.
    from torchtitan_lc.plan.hardware import make_cluster
    from torchtitan_lc.plan.job import planned_model
    from torchtitan_lc.plan.planner import make_plan
    from torchtitan_lc.plan.report import report

    cluster = make_cluster(config.plan)
    model = planned_model(config)
    if config.plan.ladder:
        from torchtitan_lc.plan.ladder import draw

        draw(config, model, cluster, Path(config.plan.ladder))
    if config.plan.search:
        from torchtitan_lc.plan.found import search

        return FITS if search(config, model, cluster) else DOES_NOT_FIT
    if config.plan.ladder:
        return FITS
    plan = make_plan(config, model, cluster)
    print(report(plan, model))
    return FITS if plan.fits else DOES_NOT_FIT
