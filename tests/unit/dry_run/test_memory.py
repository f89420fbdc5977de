"""Tensors counted one by one."""

from __future__ import annotations

import pytest
import torch

from torchtitan_lc.dry_run.memory import CountedBytes, shown

MIB = 2**20


def test_a_tensor_counts_from_its_making_until_it_is_freed() -> None:
    memory = CountedBytes(limit=10 * MIB)
    with memory:
        x = torch.zeros(MIB, dtype=torch.uint8)
        y = x.view(2, -1)[0]  # the same memory
        z = x + 1
        assert memory.now == memory.peak == 2 * MIB
        del z
        assert (memory.now, memory.peak) == (MIB, 2 * MIB)
        memory.restart()
        assert memory.peak == MIB
        del x
        assert memory.now == MIB, "a view keeps it"
        del y
    assert memory.now == 0


def test_a_storage_that_is_resized_counts_as_large_as_it_is() -> None:
    memory = CountedBytes(limit=10 * MIB)
    with memory, memory.resizing():
        x = torch.zeros(MIB, dtype=torch.uint8)
        x.untyped_storage().resize_(0)
        assert memory.now == 0
        x.untyped_storage().resize_(3 * MIB)
        assert (memory.now, memory.peak) == (3 * MIB, 3 * MIB)


def test_what_is_held_counts_and_what_lies_elsewhere_does_not() -> None:
    memory = CountedBytes(limit=10 * MIB)
    outside = torch.zeros(MIB, dtype=torch.uint8)
    memory.hold([outside, outside[1:]])
    with memory:
        with memory.elsewhere():
            host = torch.zeros(5 * MIB, dtype=torch.uint8)
        host.add_(1)
        assert memory.now == memory.peak == MIB


def test_more_than_the_limit_is_out_of_memory() -> None:
    memory = CountedBytes(limit=3 * MIB)
    with memory:
        x = torch.zeros(2 * MIB, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError, match=r"2.00 MiB beside the 2.00 MiB"):
            x + 1
        assert memory.now == 2 * MIB


def test_sizes_are_shown_in_the_unit_that_fits() -> None:
    assert shown(3 * MIB) == "3.00 MiB" and shown(3 * 2**30) == "3.00 GiB"
