"""One process per rank, through torch's elastic agent, with nothing lost and nobody left behind.

    this process ── rank 0 (in shown_ranks)  keeps our stdout and stderr, so it may see a terminal
                 ├─ rank 1                   <log_folder>/rank1.stdout.log, rank1.stderr.log
                 └─ ...

The agent does the work: rendezvous, environment variables, forwarding SIGTERM and SIGINT to every
worker's process group (SIGKILL after a grace time, TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds, 30 by
default), and ending the other workers when one fails. Ours are the files and the exit code.
"""

import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.logging import logger

# The agent's own lines about what is said here in one, by the start of their text.
_SAID_IN_ONE_LINE = {
    "torch.distributed.elastic.multiprocessing.api": ("failed (exitcode", "Sending process"),
    "torch.distributed.elastic.agent.server.api": ("Received",),
}


@dataclass(frozen=True)
class Workers:
    """How many workers this node starts, how the nodes find each other, where output goes.

    ``shown_ranks`` are global. ``node_rank`` is needed by the "static" backend; with "c10d" ranks
    follow the order of the rendezvous, and a given node_rank only says which node holds its store
    (0), for machines whose names don't tell. ``environment``: variables for every worker, beside those
    of this process.
    """

    nproc_per_node: int
    nnodes: int
    node_rank: int | None
    rdzv_backend: str
    rdzv_endpoint: str
    rdzv_id: str
    shown_ranks: frozenset[int]
    log_folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.nproc_per_node * self.nnodes


class RankLogs(LogsSpecs):
    """Decides by global rank who keeps the terminal.

    torch's own DefaultLogsSpecs knows only local ranks: on 2 x 8 GPUs LOG_RANK=9 would show nobody.
    """

    def __init__(
        self, folder: Path, shown_ranks: frozenset[int], environment: Mapping[str, str]
    ) -> None:
        super().__init__(log_dir=str(folder))
        self._folder = folder
        self._shown_ranks = shown_ranks
        self._environment = environment

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Destinations per local rank ("" is the terminal); completes the workers' environments."""
        destinations = LogsDest()
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            is_shown = rank in self._shown_ranks
            destinations.stdouts[local_rank] = "" if is_shown else str(self.path(rank, "stdout"))
            destinations.stderrs[local_rank] = "" if is_shown else str(self.path(rank, "stderr"))
            error_file = str(self._folder / f"rank{rank}.error.json")
            destinations.error_files[local_rank] = error_file
            env["TORCHELASTIC_ERROR_FILE"] = error_file
            env["LOG_RANK"] = ",".join(map(str, sorted(self._shown_ranks)))
            env.update(self._environment)
        return destinations

    def path(self, rank: int, stream: str) -> Path:
        return self._folder / f"rank{rank}.{stream}.log"


class _KeepQuiet(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(_SAID_IN_ONE_LINE[record.name])


def run_workers(workers: Workers, command: Sequence[str]) -> int:
    """Run ``python -u <command>`` once per rank of this node; the exit code of the whole.

    0 when all ranks succeed. Otherwise the failed worker's own code, or 128 + n if signal n ended
    it or this process. Raises UserError when the log folder can't be made, or the nodes can't find each
    other.
    """
    try:
        workers.log_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"job.dump_folder: the folder of its logs cannot be made: {error.filename}: {error.strerror}; "
            "name another job.dump_folder, or make room or way there"
        ) from error
    logs = RankLogs(workers.log_folder, workers.shown_ranks, workers.environment)
    for name in _SAID_IN_ONE_LINE:
        logging.getLogger(name).addFilter(_KeepQuiet())
    config = LaunchConfig(
        min_nodes=workers.nnodes,
        max_nodes=workers.nnodes,
        nproc_per_node=workers.nproc_per_node,
        logs_specs=logs,
        run_id=workers.rdzv_id,
        role="rank",
        rdzv_backend=workers.rdzv_backend,
        rdzv_endpoint=workers.rdzv_endpoint,
        rdzv_configs=_rendezvous_settings(workers),
        max_restarts=0,
        # A lone node need not resolve its own name, which many containers can't.
        local_addr="localhost" if workers.nnodes == 1 else None,
    )
    try:
        elastic_launch(config, sys.executable)("-u", *command)
    except ChildFailedError as error:
        return _report(error.failures, logs, workers.shown_ranks)
    except SignalException as error:
        logger.error(f"ended by {signal.Signals(error.sigval).name}, and the workers with it")
        return 128 + error.sigval
    except RendezvousError as error:
        raise UserError(
            f"The {workers.nnodes} node(s) did not meet at {workers.rdzv_endpoint} "
            f"(RDZV_ENDPOINT, RDZV_ID={workers.rdzv_id}): {error} Start the same command on every "
            "node, and check that its host is one of them and its port is free and reachable."
        ) from error
    return 0


def _rendezvous_settings(workers: Workers) -> dict[str, Any]:
    if workers.rdzv_backend == "static":
        return {"rank": workers.node_rank or 0}
    if workers.nnodes > 1 and workers.node_rank is not None:
        return {"is_host": workers.node_rank == 0}
    return {}


def first_cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, int]:
    """(rank, exit code) of the failure that brought the others down; codes below 0 are signals.

    The agent's time stamps are whole seconds, and one failed rank breaks its peers' connections at
    once. So: a mistake that was explained (exit code 2) before anything, what the agent itself
    ended (SIGTERM) last, then by time.
    """
    rank = min(
        failures,
        key=lambda r: (
            failures[r].exitcode == -signal.SIGTERM,
            failures[r].exitcode != 2,
            failures[r].timestamp,
        ),
    )
    return rank, failures[rank].exitcode


def _report(
    failures: Mapping[int, ProcessFailure], logs: RankLogs, shown_ranks: frozenset[int]
) -> int:
    rank, exitcode = first_cause(failures)
    where = "its output is above" if rank in shown_ranks else f"see {logs.path(rank, 'stderr')}"
    if exitcode >= 0:
        logger.error(f"rank {rank} failed with exit code {exitcode}; {where}")
        return exitcode
    hint = " (SIGKILL: often the system ran out of memory)" if exitcode == -signal.SIGKILL else ""
    name = signal.Signals(-exitcode).name
    logger.error(f"rank {rank} was ended by {name}, exit code {128 - exitcode}{hint}; {where}")
    return 128 - exitcode
