"""What a worker knows of the launcher that started it, and how it ends with it.

The launcher tells its workers its process id (LAUNCHER_PID, set in launch.py). A process whose parent
that is knows two things: the job has been checked, and without the launcher nobody waits for it.
"""

import ctypes
import os
import signal
import sys

from torchtitan_lc.tools.logging import logger

LAUNCHER_PID = "TTLC_LAUNCHER_PID"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def is_launched() -> bool:
    """Whether launch.py started this process. Not so by hand, by plain torchrun, and for a program
    that a worker starts: it inherits the variable, but not the parent."""
    return os.environ.get(LAUNCHER_PID) == str(os.getppid())


def end_with_launcher() -> None:
    """Have the kernel send SIGTERM to this process when the launcher is gone.

    The launcher ends its workers whenever it can; one that is killed by SIGKILL cannot, and its
    workers would go on and hold their GPUs. Call it in a process that the launcher started, whichever
    thread. Linux only; elsewhere it does nothing.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM)) != 0:
        reason = os.strerror(ctypes.get_errno())
        logger.warning(f"This worker will outlive a launcher that is killed (prctl: {reason})")
    elif not is_launched():  # it was gone before the kernel was asked
        os.kill(os.getpid(), signal.SIGTERM)
