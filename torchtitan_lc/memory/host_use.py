"""How many bytes of page-locked host memory one rank needs, whether its layers share buffers or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

from torchtitan_lc.memory.host_memory import HostBuffer, HostMemory


@dataclass
class HostUse:
    """Bytes that are taken from every HostMemory of the process: now, and at most."""

    now: int = 0
    peak: int = 0

    @contextmanager
    def counting(
        self, allocating: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Iterator[None]:
        """Counts inside. allocating: entered around each allocation of a buffer."""
        take, give = HostMemory.take, HostMemory.give

        def taken(memory: HostMemory, n_bytes: int) -> HostBuffer:
            self.now += n_bytes
            self.peak = max(self.peak, self.now)
            with allocating():
                return take(memory, n_bytes)

        def given(memory: HostMemory, buffer: HostBuffer) -> None:
            self.now -= buffer.data.numel()
            give(memory, buffer)

        with patch.object(HostMemory, "take", taken), patch.object(HostMemory, "give", given):
            yield
