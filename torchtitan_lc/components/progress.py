"""A progress bar on a terminal, and nothing anywhere else.

Log files, pipes and schedulers' outputs get plain lines only: the bar needs stderr to be a
terminal. While it is shown, log lines are printed above it instead of through it.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

from torchtitan_lc.tools.logging import logger


class ProgressBar:
    """Steps done, steps to do, time left; silent unless ``enabled`` and stderr is a terminal."""

    def __init__(self, total_steps: int, start_step: int, *, enabled: bool) -> None:
        self._open = ExitStack()
        self._bar = None
        if not (enabled and sys.stderr.isatty()):
            return
        from tqdm import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm

        self._bar = tqdm(
            total=total_steps, initial=start_step, unit="step", dynamic_ncols=True, leave=False
        )
        self._open.enter_context(self._bar)
        self._open.enter_context(logging_redirect_tqdm(loggers=[logger]))

    def move_to(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def close(self) -> None:
        """Take the bar off the terminal and let log lines go their usual way; may be repeated."""
        self._open.close()
        self._bar = None
