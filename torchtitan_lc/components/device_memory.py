"""Peak memory since the last look, per process.

On CUDA: what the caching allocator held. "Active" is memory in use by tensors, "reserved" is what
the allocator took from the device, unused cache included: that is what an out-of-memory error is
about. On a CPU: the largest resident set that the process ever had, which cannot be restarted, as
both.
"""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass

import torch

_GIB = 1024**3


@dataclass(frozen=True)
class MemoryUse:
    active_gib: float
    active_percent: float
    reserved_gib: float
    reserved_percent: float
    alloc_retries: int
    ooms: int


class DeviceMemory:
    """Watches one device from its construction on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            self._total = torch.cuda.get_device_properties(device).total_memory
        else:
            self._total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.restart()

    def peak(self) -> MemoryUse:
        if self._device.type != "cuda":
            resident = _peak_resident_bytes()
            return self._use(resident, resident, 0, 0)
        stats = torch.cuda.memory_stats(self._device)
        return self._use(
            stats.get("active_bytes.all.peak", 0),
            stats.get("reserved_bytes.all.peak", 0),
            stats.get("num_alloc_retries", 0),
            stats.get("num_ooms", 0),
        )

    def restart(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def _use(self, active: int, reserved: int, alloc_retries: int, ooms: int) -> MemoryUse:
        return MemoryUse(
            active_gib=active / _GIB,
            active_percent=100.0 * active / self._total,
            reserved_gib=reserved / _GIB,
            reserved_percent=100.0 * reserved / self._total,
            alloc_retries=alloc_retries,
            ooms=ooms,
        )


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB on Linux
