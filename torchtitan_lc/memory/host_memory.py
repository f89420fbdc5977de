"""Host buffers for copies to and from a GPU: of exact size, page-locked once, reused every step.

torch's own page-locked memory is rounded up to a power of two (2.5 GiB takes 4), so ordinary memory is
allocated and registered with CUDA instead. It is touched first while this process runs on the CPUs
beside its GPU, so that the pages lie in that NUMA node's memory.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class HostBuffer:
    """data: bytes on the host. free_after: the last copy from or to them, which has to have happened
    before they are overwritten."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.free_after: Any = None


class HostMemory:
    """The buffers of one rank.

    shared: one buffer for all that have the same size. What is read back is then wrong: for measuring
    a rank's GPU memory on a machine with less host memory than the job's.
    """

    def __init__(self, device: torch.device, *, shared: bool = False) -> None:
        self.device = device
        self.shared = shared
        self.allocated = 0  # bytes
        self._free: dict[int, list[HostBuffer]] = defaultdict(list)

    def take(self, n_bytes: int) -> HostBuffer:
        free = self._free[n_bytes]
        if free:
            return free[0] if self.shared else free.pop()
        buffer = HostBuffer(_page_locked(n_bytes, self.device))
        self.allocated += n_bytes
        if self.shared:
            free.append(buffer)
        return buffer

    def give(self, buffer: HostBuffer) -> None:
        if not self.shared:
            self._free[buffer.data.numel()].append(buffer)


def available_bytes(ranks_on_node: int, root: Path = Path("/")) -> int:
    """Host memory that a rank may take: its share of what the node, and this process's cgroups, have.

    root: where /proc and /sys lie.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    free = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    room = [int(free) * 1024, *_cgroup_room(root)]
    return max(min(room), 0) // ranks_on_node


# Of a cgroup, version 2 and 1: its limit, what it uses, and how much of that is file cache that goes
# as soon as memory is asked for.
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _cgroup_room(root: Path) -> Iterator[int]:
    """Bytes up to each limit that binds this process: those of its own cgroup and of all around it."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if "memory" in controllers.split(","):
            mount, names = mount / "memory", _V1
        elif not controllers:
            names = _V2
        else:
            continue
        own = mount / path.lstrip("/")
        # A container sees its own cgroup as the mount, whatever the path says.
        for folder in {own, *own.parents, mount}:
            limit, used = folder / names[0], folder / names[1]
            if not limit.exists() or not used.exists() or limit.read_text().strip() == "max":
                continue
            stat = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
            cache = int(stat.get(names[2], 0))
            yield int(limit.read_text()) - int(used.read_text()) + cache


def mapped(n_bytes: int) -> Tensor:
    """n_bytes (at least 1) of fresh memory, in huge pages where the system gives them: there are fewer to
    be found, zeroed and locked."""
    # Private: shared memory has a switch of its own for huge pages, which is off as a rule.
    memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # After a fork this process could be given copies of pages of which the GPU has locked the originals.
    memory.madvise(mmap.MADV_DONTFORK)
    # EINVAL: a kernel without huge pages, for which the advice means nothing.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _page_locked(n_bytes: int, device: torch.device) -> Tensor:
    if device.type != "cuda" or not n_bytes:
        return torch.empty(n_bytes, dtype=torch.uint8)
    data = mapped(n_bytes)
    with _beside(device):
        error = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), n_bytes, 0)
    if int(error):
        raise RuntimeError(
            f"{n_bytes / 2**30:.2f} GiB of host memory could not be page-locked (CUDA error "
            f"{int(error)}): raise the limit (ulimit -l unlimited), or lower "
            "activation_offload.host_memory_gib"
        )
    weakref.finalize(data, torch.cuda.cudart().cudaHostUnregister, data.data_ptr())
    return data


@contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Run on the CPUs next to the GPU, where the system says which and allows it."""
    before = os.sched_getaffinity(0)
    beside = _cpus_beside(device) & before
    if beside:
        os.sched_setaffinity(0, beside)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cpus_beside(device: torch.device) -> set[int]:
    p: Any = torch.cuda.get_device_properties(device)
    if not hasattr(p, "pci_bus_id"):
        return set()
    name = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
    path = Path("/sys/bus/pci/devices") / name / "local_cpulist"
    cpus: set[int] = set()
    if path.exists():
        for part in filter(None, path.read_text().strip().split(",")):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus
