"""Start a job: find every mistake in this one process, then start the workers.

    run_train.sh ── python -m torchtitan_lc.launch --nproc_per_node 8 -- --config x.toml ...
                      1. load the config     --help, --job.print_config, --plan and --dry_run end here
                      2. preflight           all rule failures at once, before any process group
                      3. one `python -m torchtitan_lc.train <job arguments>` per rank

Exit code: 0, 2 for a mistake of the user's, 3 for a plan or a dry run that does not fit, 141 where nobody
reads what was to be printed, else that of the failed worker (128 + n for signal n).
"""

import argparse
import os
import sys
import time
from pathlib import Path

from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.manager import load_config, to_toml
from torchtitan_lc.config.resolve import plan_is_asked
from torchtitan_lc.dry_run import command as dry_run
from torchtitan_lc.plan import command as plan
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.logging import init_logger, logger
from torchtitan_lc.tools.parent import LAUNCHER_PID
from torchtitan_lc.tools.stdout import reader_may_leave

WORKER_MODULE = "torchtitan_lc.train"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _ranks(text: str) -> frozenset[int]:
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"LOG_RANK={text} is not a comma list of ranks such as 0,3"
        ) from error


def split_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(our own arguments, the job's): what follows "--" is the job's and is not looked at.

    argparse ends the process with exit code 2 for a wrong argument of ours.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_lc.launch",
        usage="%(prog)s [options] -- [--section.key value ...]",
        description="Check a job, then start its workers. Usually called by run_train.sh.",
    )
    add = parser.add_argument
    add("--nproc_per_node", type=_positive, required=True, help="workers on this node")
    add("--nnodes", type=_positive, default=1, help="nodes; each runs this program once")
    add("--node_rank", type=int, help="this node's number: which one holds the rendezvous (0)")
    add("--rdzv_backend", choices=("c10d", "static"), default="c10d")
    add("--rdzv_endpoint", default="localhost:0", help="host:port, the same on every node")
    add("--rdzv_id", default="torchtitan_lc", help="tells this job from others at the endpoint")
    add("--log_rank", type=_ranks, default="0", help="comma list of ranks that keep the terminal")
    return parser.parse_args(argv[:end]), argv[end + 1 :]


def check_processes(nproc_per_node: int, device_type: str, visible_gpus: int) -> None:
    """UserError if workers would have to share a GPU: NCCL refuses that, minutes later."""
    if device_type == "cuda" and nproc_per_node > visible_gpus:
        raise UserError(
            f"NGPU={nproc_per_node} processes on this node, but {visible_gpus} visible GPU(s). "
            f"Set NGPU={visible_gpus}, or leave it out to use every visible GPU "
            '(CUDA_VISIBLE_DEVICES="" runs on the CPU).'
        )


def check_shown_ranks(shown_ranks: frozenset[int], world_size: int) -> None:
    """UserError for a rank that does not exist: its output would be waited for in vain."""
    wrong = sorted(rank for rank in shown_ranks if not 0 <= rank < world_size)
    if wrong:
        raise UserError(
            f"LOG_RANK names {', '.join(map(str, wrong))}, but this job's ranks are 0 to "
            f"{world_size - 1}."
        )


def preflight(config: JobConfig, args: argparse.Namespace) -> str:
    """Raises UserError if the job can't run as asked; the device type that it will run on."""
    # torch is loaded only now, so that --help and --job.print_config answer at once.
    import torch

    from torchtitan_lc.preflight import check_job
    from torchtitan_lc.tools.hardware import device_type

    device = device_type()
    world_size = args.nproc_per_node * args.nnodes
    check_processes(args.nproc_per_node, device, torch.cuda.device_count())
    check_shown_ranks(args.log_rank, world_size)
    check_job(config, world_size, device, ranks_per_node=args.nproc_per_node)
    return device


def start(config: JobConfig, args: argparse.Namespace, job_args: list[str]) -> int:
    """Check, then run the workers to their end; the exit code."""
    device = preflight(config, args)
    from torchtitan_lc.tools.folder_lock import held
    from torchtitan_lc.tools.workers import Workers, run_workers

    dump_folder = Path(config.job.dump_folder)
    workers = Workers(
        nproc_per_node=args.nproc_per_node,
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        rdzv_backend=args.rdzv_backend,
        rdzv_endpoint=args.rdzv_endpoint,
        rdzv_id=args.rdzv_id,
        shown_ranks=args.log_rank,
        log_folder=dump_folder / "logs" / time.strftime("%Y-%m-%d_%H-%M-%S"),
        # By this a worker knows that the job is checked, and whom to end with (tools/parent.py).
        environment={LAUNCHER_PID: str(os.getpid())},
    )
    nodes = f"{args.nnodes} nodes x " if args.nnodes > 1 else ""
    others = f"; other ranks' output: {workers.log_folder}"
    # By where they meet, nodes know each other as one job's; each may call the host by another name.
    port = args.rdzv_endpoint.rpartition(":")[2]
    job = f"{args.rdzv_id} at port {port}" if args.nnodes > 1 else None
    with held(dump_folder, job):
        logger.info(
            f"Starting {nodes}{args.nproc_per_node} {device} process(es)"
            + (others if workers.world_size > len(args.log_rank) else "")
        )
        return run_workers(workers, ["-m", WORKER_MODULE, *job_args])


def main(argv: list[str] | None = None) -> int:
    """The program; ``argv`` is without its name. Returns the exit code."""
    try:
        with reader_may_leave():
            args, job_args = split_args(sys.argv[1:] if argv is None else argv)
            init_logger()
            config = load_config(job_args)
            if config.job.print_config:
                print(to_toml(config))
                return 0
            if plan_is_asked(config) and dry_run.is_asked(config):
                raise UserError(
                    "plan.enable, plan.search or plan.ladder with dry_run.enable: give one of --plan and "
                    "--dry_run; a dry run prints the job's plan beside what it measures"
                )
            if plan_is_asked(config):
                return plan.run(config)
            if dry_run.is_asked(config):
                return dry_run.run(config)
        return start(config, args, job_args)
    except UserError as error:
        indented = str(error).strip().replace("\n", "\n  ")
        print(f"torchtitan_lc: this job can't run\n  {indented}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
