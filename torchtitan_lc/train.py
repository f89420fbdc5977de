"""One worker of a training job: ``python -m torchtitan_lc.train --section.key value ...``

run_train.sh starts as many of these as there are ranks, after the launcher has checked the job.
Started by plain torchrun, or by hand as a job of one process, they check it themselves.
"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

from torchtitan_lc.components.agreement import same_on_all
from torchtitan_lc.config import names
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.manager import load_config, to_toml
from torchtitan_lc.config.validate import check
from torchtitan_lc.config.values import toml_item
from torchtitan_lc.distributed.setup import init_distributed, seed_everything
from torchtitan_lc.preflight import check_job
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.hardware import device_type
from torchtitan_lc.tools.logging import init_logger
from torchtitan_lc.tools.parent import end_with_launcher, is_launched
from torchtitan_lc.trainer import Trainer

EXIT_USER_ERROR = 2

_PATHS = (
    "job.config_file",
    "job.dump_folder",
    "model.hf_assets_path",
    "training.dataset_path",
    "checkpoint.folder",
    "checkpoint.initial_load_path",
)


def checked_config(argv: list[str]) -> JobConfig:
    """The job that ``argv`` describes. Raises UserError, on every rank, if it cannot run.

    What is only worth a warning is said once: by the launcher, or else by rank 0.
    """
    is_checked = is_launched()
    quiet = is_checked or not _is_first()
    config = load_config(argv, quiet=quiet)
    if config.plan.enable or config.dry_run.enable:
        raise UserError("--plan and --dry_run start no workers: give them to run_train.sh")
    if not is_checked:
        check_job(config, int(os.environ.get("WORLD_SIZE", "1")), device_type(), quiet=quiet)
    return config


def run(config: JobConfig) -> None:
    """Train as ``config`` says; the environment says which rank this is."""
    seed_everything(config.debug.seed, config.debug.deterministic)
    device = init_distributed(
        device_type(), config.comm.init_timeout_seconds, config.comm.trace_buf_size
    )
    problems = check(
        config, dist.get_world_size()
    )  # launchers may have started other numbers of ranks
    if problems:
        raise UserError("\n".join(problems))
    same_on_all(
        _settings(config),
        "The ranks were started with different settings. Give every node the same config and arguments:",
    )
    trainer = Trainer(config, device)
    try:
        trainer.train()
    finally:
        trainer.close()
    # Not after an error: it waits for the other ranks' communicators, before the error is shown.
    dist.destroy_process_group()


def _settings(config: JobConfig) -> dict[str, str]:
    """What must be the same on all ranks. Files may lie elsewhere on another node."""
    return {
        key: toml_item(names.get_key(config, key))
        for key in names.all_keys()
        if key not in _PATHS and names.get_key(config, key) is not None
    }


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for a mistake that the user can fix."""
    init_logger()
    if is_launched():
        end_with_launcher()
    try:
        config = checked_config(sys.argv[1:] if argv is None else argv)
        if config.job.print_config:
            if _is_first():
                print(to_toml(config))
            return 0
        run(config)
    except UserError as error:
        # Of a launched job the other ranks' stderr is a file each, and one may fail alone.
        if _is_first() or is_launched():
            print(f"torchtitan_lc cannot go on:\n{error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    code = main()
    if code:
        # The process group is still up, see run: threads of gloo would abort the interpreter's own exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
