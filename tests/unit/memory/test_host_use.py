"""Bytes of page-locked memory that a rank needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchtitan_lc.memory.host_memory import HostMemory
from torchtitan_lc.memory.host_use import HostUse


def test_host_memory_is_what_is_held_at_once_even_where_buffers_are_shared() -> None:
    use, memory = HostUse(), HostMemory(torch.device("cpu"), shared=True)
    with use.counting():
        held = [memory.take(100), memory.take(100)]
        memory.give(held.pop())
        memory.take(50)
    assert (use.peak, use.now) == (200, 150)
    assert memory.allocated == 150
    memory.take(1000)
    assert use.peak == 200, "not counted any more"


def test_each_allocation_of_a_buffer_is_inside_the_context_given() -> None:
    entered = []

    @contextmanager
    def allocating() -> Iterator[None]:
        entered.append(memory.allocated)
        yield

    memory = HostMemory(torch.device("cpu"))
    with HostUse().counting(allocating):
        memory.take(100)
    assert entered == [0]
