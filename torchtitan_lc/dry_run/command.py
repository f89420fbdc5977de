"""`--dry_run`: what the launcher does instead of starting workers."""

from __future__ import annotations

from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.plan.command import DOES_NOT_FIT, FITS


def is_asked(config: JobConfig) -> bool:
    return config.dry_run.enable


def run(config: JobConfig) -> int:
    """Run, print and write the comparison; the exit code. Raises UserError for a job that this machine
    cannot stand in for."""
    # torch is loaded only now, so that --help answers at once.
    from torchtitan_lc.dry_run.compare import Comparison
    from torchtitan_lc.dry_run.job import make_dry_job
    from torchtitan_lc.dry_run.measure import measure
    from torchtitan_lc.tools.hardware import device_type

    job = make_dry_job(config, device_type())
    comparison = Comparison(job, measure(job))
    print(comparison.report())
    comparison.write(config.job.dump_folder)
    return FITS if comparison.fits else DOES_NOT_FIT
