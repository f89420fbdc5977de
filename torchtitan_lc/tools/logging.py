"""The one logger, and what reaches the console.

A line looks as in TorchTitan, so that people's scripts keep reading it:

    [titan] 2026-11-29 20:46:01,123 - root - INFO - step: 10  loss: 7.1234 ...

Only the ranks named in the environment variable LOG_RANK (default "0") write below WARNING. With
several writers each line begins with its rank, "[rank3]:[titan] ...".
"""

import logging
import os
import sys

logger = logging.getLogger("torchtitan_lc")

_warned: set[str] = set()


def shown_ranks() -> set[int]:
    """The global ranks in LOG_RANK. Raises ValueError if it is not a comma list of numbers."""
    text = os.environ.get("LOG_RANK", "") or "0"
    try:
        return {int(part) for part in text.split(",")}
    except ValueError as error:
        raise ValueError(f"LOG_RANK={text!r} is not a comma list of ranks such as 0,3") from error


def init_logger() -> None:
    """Send the log to stderr, by the rules above. Calling it again replaces the earlier set-up.

    Reads RANK; a process without one (the launcher) is the only writer. Records stay out of the
    root logger, where some packages put handlers of their own: every line would come twice.
    """
    shown = shown_ranks()
    rank = int(os.environ["RANK"]) if "RANK" in os.environ else None
    is_shown = rank is None or rank in shown
    is_only_writer = rank is None or shown == {rank}
    prefix = "" if is_only_writer else f"[rank{rank}]:"

    handler = logging.StreamHandler(sys.stderr)
    # TorchTitan logs through the root logger; its word stays in the line.
    handler.setFormatter(
        logging.Formatter(f"{prefix}[titan] %(asctime)s - root - %(levelname)s - %(message)s")
    )
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if is_shown else logging.WARNING)


def warn_once(message: str) -> None:
    """Log a warning the first time that this process says it; the rest would bury other lines."""
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)
