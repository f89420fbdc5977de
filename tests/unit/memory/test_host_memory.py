"""Host buffers of exact size, used again; how much of the host a rank may take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchtitan_lc.memory.host_memory import HostMemory, available_bytes, mapped

CPU = torch.device("cpu")
KIB = 1024


def test_buffers_are_of_exact_size_and_used_again() -> None:
    memory = HostMemory(CPU)
    first, second = memory.take(1000), memory.take(1000)
    assert first is not second and first.data.untyped_storage().nbytes() == 1000
    assert memory.allocated == 2000
    memory.give(second)
    assert memory.take(1000) is second
    memory.give(first)
    assert memory.take(999) is not first, "another size"
    assert memory.allocated == 2999


def test_what_is_shared_exists_once_for_each_size() -> None:
    memory = HostMemory(CPU, shared=True)
    first = memory.take(1000)
    assert memory.take(1000) is first
    memory.give(first)
    assert memory.take(1000) is first
    memory.take(10)
    assert memory.allocated == 1010


class Root:
    """A file system with /proc and /sys: MemAvailable, and cgroups."""

    def __init__(self, path: Path, available: int, groups: str = "") -> None:
        self.path = path
        self.write(
            "proc/meminfo",
            f"MemTotal: {2 * available} kB\nMemAvailable:   {available} kB\nHugePages_Total: 0\n",
        )
        if groups:
            self.write("proc/self/cgroup", groups)

    def write(self, name: str, text: object) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def v2(self, group: str, limit: object, used: int, cache: int = 0) -> None:
        folder = f"sys/fs/cgroup/{group}"
        self.write(f"{folder}/memory.max", limit)
        self.write(f"{folder}/memory.current", used)
        self.write(f"{folder}/memory.stat", f"anon {used - cache}\ninactive_file {cache}")

    def v1(self, group: str, limit: int, used: int, cache: int = 0) -> None:
        folder = f"sys/fs/cgroup/memory/{group}"
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", used)
        self.write(f"{folder}/memory.stat", f"total_inactive_file {cache}\ninactive_file 0")


def test_without_a_cgroup_a_rank_has_its_share_of_the_node(tmp_path: Path) -> None:
    Root(tmp_path, 800)
    assert available_bytes(1, tmp_path) == 800 * KIB
    assert available_bytes(8, tmp_path) == 100 * KIB


def test_the_limit_of_a_container_binds(tmp_path: Path) -> None:
    root = Root(tmp_path, 800, "0::/")
    root.v2("", 500 * KIB, 100 * KIB)
    assert available_bytes(2, tmp_path) == 200 * KIB
    root.v2("", "max", 100 * KIB)
    assert available_bytes(2, tmp_path) == 400 * KIB
    root.v2("", 10**15, 100 * KIB)
    assert available_bytes(2, tmp_path) == 400 * KIB


def test_file_cache_that_goes_when_asked_does_not_count_as_used(tmp_path: Path) -> None:
    root = Root(tmp_path, 800, "0::/")
    root.v2("", 500 * KIB, 499 * KIB, cache=399 * KIB)
    assert available_bytes(1, tmp_path) == 400 * KIB


@pytest.mark.parametrize("tightest", ["job", "job/step_0", "job/step_0/task_1"])
def test_the_tightest_of_nested_cgroups_binds(tmp_path: Path, tightest: str) -> None:
    root = Root(tmp_path, 800, "0::/job/step_0/task_1")
    for group in ("job", "job/step_0", "job/step_0/task_1"):
        root.v2(group, 300 * KIB if group == tightest else 700 * KIB, 50 * KIB)
    root.v2("another_job", KIB, 0)
    assert available_bytes(1, tmp_path) == 250 * KIB


def test_cgroups_of_version_1_are_read_too(tmp_path: Path) -> None:
    root = Root(tmp_path, 800, "5:cpu,cpuacct:/job\n4:memory:/job/step_0\n0::/")
    root.v1("", 9223372036854771712, 600 * KIB)
    root.v1("job", 300 * KIB, 100 * KIB, cache=50 * KIB)
    assert available_bytes(1, tmp_path) == 250 * KIB
    # In a container the path is the host's, and its own cgroup is what is mounted.
    root.write("proc/self/cgroup", "4:memory:/docker/0123abc")
    root.v1("", 200 * KIB, 100 * KIB)
    assert available_bytes(1, tmp_path) == 100 * KIB


def test_a_cgroup_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    Root(tmp_path, 800, "0::/").v2("", 100, 200)
    assert available_bytes(1, tmp_path) == 0


def test_this_machine_has_some() -> None:
    assert available_bytes(1) > 0


def test_mapped_memory_has_the_size_asked_for_and_starts_empty() -> None:
    data = mapped(3 * 2**21 + 5)
    assert data.numel() == 3 * 2**21 + 5 and data.dtype == torch.uint8 and not data.any()
    data.fill_(7)
    view = data[:8].view(torch.int64)
    del data
    assert view.item() == 0x0707070707070707
