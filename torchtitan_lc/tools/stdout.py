"""Output that somebody may stop reading, as `| head` does."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNREAD = 128 + signal.SIGPIPE


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the program quietly when what it prints is read no longer, with the exit code of one that SIGPIPE
    ends. Python ignores that signal, so that a broken connection of ours is an exception and no end."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes what is left when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(UNREAD)
