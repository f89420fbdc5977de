"""A command that may take so long and no longer."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# A launcher that is told to end gives its workers so many seconds, and gets some more itself.
WORKERS_MAY_TAKE = 10
LAUNCHER_MAY_TAKE = 30


@dataclass(frozen=True)
class Ended:
    """output: stdout, then stderr. ended_early: it ran into its limit."""

    exit_code: int
    output: str
    seconds: float
    ended_early: bool


def run(command: Sequence[str], environment: Mapping[str, str], limit: float | None) -> Ended:
    """Runs ``command`` with ``environment`` added to this process's; after ``limit`` seconds it is told
    to end, and killed if it does not."""
    shutdown = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(WORKERS_MAY_TAKE)}
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        env={**shutdown, **os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ended_early = False
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        ended_early = True
        process.terminate()
        try:
            out, err = process.communicate(timeout=LAUNCHER_MAY_TAKE)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
    seconds = time.monotonic() - began
    return Ended(process.returncode, out + err, seconds, ended_early)
