"""Adam with its moments in host memory: torch's numbers, torch's state, and the order of the copies."""

from __future__ import annotations

import copy
import dataclasses
import gc
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchtitan_lc.components.lr_scheduler import build_lr_scheduler
from torchtitan_lc.components.offloaded_adam import OffloadedAdam, Visit, pipeline
from torchtitan_lc.components.optimizer import build_optimizer
from torchtitan_lc.config.job_config import LRScheduler, Optimizer


class SmallModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(7, 5)
        self.empty = nn.Parameter(torch.empty(0, 5))  # a shard of a table with too few rows
        self.norm = nn.RMSNorm(5)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.projection(x)).square().sum() + self.empty.sum()


class Run:
    """A model, its optimizer and its schedule, and gradients that depend on the step alone."""

    def __init__(self, config: Optimizer, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = SmallModel().to(dtype)
        self.optimizer = build_optimizer(self.model.named_parameters(), config)
        self.schedule = build_lr_scheduler(self.optimizer, LRScheduler(warmup_steps=2), 8)
        self.dtype = dtype

    def train(self, steps: range) -> Run:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(4, 7, generator=generator).to(self.dtype)
            self.model(x).backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        return self


def _config(offload: bool, **fields: Any) -> Optimizer:
    return dataclasses.replace(Optimizer(lr=0.05), offload_state=offload, **fields)


def _assert_same_run(a: Run, b: Run) -> None:
    for (name, x), y in zip(a.model.named_parameters(), b.model.parameters(), strict=True):
        assert torch.equal(x, y), name
        states = a.optimizer.state[x], b.optimizer.state[y]
        if name == "unused":  # torch's has no state of what never had a gradient
            assert all(not value.any() for state in states for value in state.values())
            continue
        assert states[0].keys() == states[1].keys(), name
        for key, value in states[0].items():
            assert torch.equal(value, states[1][key]), (name, key)
            assert value.dtype == states[1][key].dtype, (name, key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_parameters_and_state_are_those_of_torch_bit_for_bit(
    name: str, implementation: str, dtype: torch.dtype
) -> None:
    settings = {"name": name, "implementation": implementation}
    ours = Run(_config(True, **settings), dtype).train(range(5))
    assert isinstance(ours.optimizer, OffloadedAdam)
    _assert_same_run(ours, Run(_config(False, **settings), dtype).train(range(5)))


@pytest.mark.parametrize("saved_by_ours", [True, False])
@pytest.mark.parametrize("loaded_by_ours", [True, False])
def test_a_state_dict_goes_from_torch_to_ours_and_back(
    saved_by_ours: bool, loaded_by_ours: bool
) -> None:
    first = Run(_config(saved_by_ours)).train(range(3))
    second = Run(_config(loaded_by_ours)).train(range(1))  # its own state has to go
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    second.schedule.load_state_dict(first.schedule.state_dict())
    second.train(range(3, 6))
    _assert_same_run(second, Run(_config(False)).train(range(6)))


def test_moments_that_a_state_dict_lacks_are_zero_as_in_torch() -> None:
    saved = Run(_config(False))  # nothing trained: torch has no state yet
    second = Run(_config(True)).train(range(1))
    second.model.load_state_dict(saved.model.state_dict())
    second.optimizer.load_state_dict(saved.optimizer.state_dict())
    second.schedule.load_state_dict(saved.schedule.state_dict())
    second.train(range(3))
    _assert_same_run(second, Run(_config(False)).train(range(3)))


def test_loading_keeps_the_moments_where_they_were_pinned() -> None:
    run = Run(_config(True)).train(range(2))

    def addresses() -> list[int]:
        states = run.optimizer.state.values()
        return [state[key].data_ptr() for state in states for key in ("exp_avg", "exp_avg_sq")]

    before = addresses()
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    assert addresses() == before


def test_host_memory_is_exactly_as_large_as_the_moments() -> None:
    model = nn.Sequential(nn.Linear(1000, 300), nn.Linear(300, 77))
    optimizer = build_optimizer(model.named_parameters(), _config(True))
    assert isinstance(optimizer, OffloadedAdam)
    moments = 2 * sum(p.nbytes for p in model.parameters())
    held = optimizer._memory.untyped_storage().nbytes()
    assert moments <= held <= moments + 2 * 64 * len(list(model.parameters()))


def test_state_outlives_the_optimizer_and_lies_in_storages_that_begin_with_it() -> None:
    run = Run(_config(True)).train(range(2))
    state = run.optimizer.state_dict()["state"]
    want = copy.deepcopy(state)
    del run
    gc.collect()
    noise = [torch.full((100_000,), 7.0) for _ in range(20)]  # would take the place of freed memory
    for i, values in state.items():
        for key, value in values.items():
            assert torch.equal(value, want[i][key]), key
            assert value.storage_offset() == 0, key
            assert value.untyped_storage().nbytes() == value.nbytes, key
    del noise


# -- the order of copies and updates, without a GPU: lanes that run what they hold as late, or in any
# order, as the events allow


class Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self.done, self._scheduler = False, scheduler

    def set(self) -> None:
        self.done = True

    def synchronize(self) -> None:
        self._scheduler.run_until(self)


class DeferredLane:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.queue: list[Event | Callable[[], Any]] = []

    def submit(self, work: Callable[[], Any]) -> None:
        self.queue.append(work)

    def record(self) -> Event:
        event = Event(self._scheduler)
        self.queue.append(event.set)
        return event

    def wait(self, event: Event) -> None:
        self.queue.append(event)

    def runnable(self) -> bool:
        while self.queue and isinstance(self.queue[0], Event) and self.queue[0].done:
            self.queue.pop(0)
        return bool(self.queue) and not isinstance(self.queue[0], Event)


class Scheduler:
    """Runs one piece of work at a time: of the first lane in a fixed order of preference that has
    one to run, or of any."""

    def __init__(self, order: tuple[str, ...] | None, seed: int = 0) -> None:
        self.upload, self.compute, self.download = (DeferredLane(self) for _ in range(3))
        self._order, self._random = order, random.Random(seed)

    def run_until(self, event: Event) -> None:
        while not event.done:
            lanes: list[DeferredLane] = [self.upload, self.compute, self.download]
            if self._order is None:
                self._random.shuffle(lanes)
            else:
                lanes = [getattr(self, name) for name in self._order]
            lane = next(lane for lane in lanes if lane.runnable())
            work = lane.queue.pop(0)
            assert not isinstance(work, Event)
            work()


_ORDERS: list[tuple[tuple[str, ...] | None, int]] = [
    (("upload", "compute", "download"), 0),
    (("compute", "upload", "download"), 0),
    (("download", "compute", "upload"), 0),
    *((None, seed) for seed in range(20)),
]


@pytest.mark.parametrize("sizes", [[8], [64, 8], [8, 64, 0, 24, 8, 40, 16], [16] * 6])
@pytest.mark.parametrize(("order", "seed"), _ORDERS)
def test_every_order_that_the_events_allow_gives_the_same_numbers(
    order: tuple[str, ...] | None, seed: int, sizes: list[int]
) -> None:
    regions = [torch.full((size,), 10 * i, dtype=torch.uint8) for i, size in enumerate(sizes)]
    want = [region + i + 1 for i, region in enumerate(regions)]
    slots: set[int] = set()

    def update(i: int, on_device: Tensor) -> None:
        assert on_device.numel() == sizes[i]
        if sizes[i]:
            slots.add(on_device.data_ptr())
        on_device.add_(i + 1)

    visits = [Visit(region, partial(update, i)) for i, region in enumerate(regions)]
    pipeline(visits, torch.device("cpu"), Scheduler(order, seed))
    for region, right in zip(regions, want, strict=True):
        assert torch.equal(region, right), "a copy and an update passed one another"
    assert len(slots) <= 2, "more than two parameters' moments were on the device"
    assert not slots & {region.data_ptr() for region in regions}


def test_uploads_wait_for_the_current_stream_and_run_one_visit_ahead() -> None:
    scheduler = Scheduler(("upload", "compute", "download"))
    done: list[str] = []
    submit = scheduler.upload.submit

    def watched(work: Callable[[], Any]) -> None:
        submit(lambda: done.append("upload"))
        submit(work)

    scheduler.upload.submit = watched  # type: ignore[method-assign]
    # The step begins while backward still uses the memory that the slots may get.
    scheduler.compute.submit(lambda: done.append("backward"))
    regions = torch.zeros(3, 8, dtype=torch.uint8)
    visits = [Visit(region, lambda _: done.append("update")) for region in regions]
    pipeline(visits, torch.device("cpu"), scheduler)
    assert done == ["backward", "upload", "upload", "update", "update", "upload", "update"]
