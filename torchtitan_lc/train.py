"""One worker of a training job: ``python -m torchtitan_lc.train --section.key value ...``

run_train.sh starts as many of these as there are ranks, after the launcher has checked the job.
Started by hand without a launcher it is a job of one process, and checks itself.
"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.manager import load_config
from torchtitan_lc.distributed.setup import init_distributed, seed_everything
from torchtitan_lc.preflight import check_job
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.hardware import device_type
from torchtitan_lc.tools.logging import init_logger
from torchtitan_lc.trainer import Trainer

EXIT_USER_ERROR = 2


def run(config: JobConfig) -> None:
    """Train as ``config`` says; the environment says which rank this is."""
    device_name = device_type()
    check_job(config, int(os.environ.get("WORLD_SIZE", "1")), device_name)
    seed_everything(config.debug.seed, config.debug.deterministic)
    device = init_distributed(
        device_name, config.comm.init_timeout_seconds, config.comm.trace_buf_size
    )
    try:
        trainer = Trainer(config, device)
        try:
            trainer.train()
        finally:
            trainer.close()
    finally:
        dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for a mistake that the user can fix."""
    init_logger()
    try:
        run(load_config(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"torchtitan_lc cannot go on:\n{error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
