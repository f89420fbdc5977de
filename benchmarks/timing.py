"""Seconds of single calls, and cases measured in turns.

Cases take turns (A B C A B C) so that a clock that drifts or a card that warms up favours none.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.record import Record, spread, why

GIB = 2**30


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(
    fn: Callable[[], Any], device: torch.device, repeats: int, warmup: int = 1
) -> list[float]:
    """Of ``repeats`` calls after ``warmup`` others, by CUDA events on a GPU."""
    for _ in range(warmup):
        fn()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            fn()
            times.append(time.perf_counter() - began)
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        fn()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in zip(marks, marks[1:], strict=False)]


def warm_up(fn: Callable[[], Any], device: torch.device, seconds: float) -> None:
    """``fn`` again and again for so long: a GPU that has just been idle runs at clocks that it cannot
    hold at full power."""
    until = now(device) + seconds
    while now(device) < until:
        fn()


@dataclass
class Case:
    """step: what is measured. clean: drops what a step leaves behind, between: all of it
    but the weights' gradients. unit: bytes of one hidden-state
    buffer, in which peak memory is given. result: what is written of it."""

    result: Record
    step: Callable[[], Any]
    clean: Callable[[], None]
    between: Callable[[], None]
    unit: int
    seconds: list[float] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return "error" in self.result


def attempt(result: Record, fn: Callable[[], Any], device: torch.device) -> Any:
    """fn(), or an "error" in ``result`` on every rank when it fails on one (out of memory is a result)."""
    value = None
    try:
        value = fn()
    except Exception as error:  # kernels raise what they like; all of it is written down
        result["error"] = why(error)
    failed = torch.tensor(float("error" in result), device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)  # also brings the ranks in step
    if failed.item():
        result.setdefault("error", "failed on another rank")
        release(device)
    return value


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure(
    cases: list[Case], *, repeats: int, device: torch.device, warm: bool, memory: bool = True
) -> None:
    """Fills in ``seconds`` (median, least, most; the slowest rank's) and on a GPU the peak of memory.

    warm: run each once before everything, so that compilation and first allocations are in
    ``first_seconds`` and in nothing else. memory: measure it, which takes two steps that are not timed.
    """
    for case in cases:
        if warm and not case.failed:
            attempt(case.result, partial(_first, case, device), device)
        if memory and not case.failed:
            attempt(case.result, partial(_peak, case, device), device)
    for _ in range(repeats):
        for case in cases:
            if not case.failed:
                attempt(case.result, partial(_timed, case, device), device)
    for case in cases:
        if repeats and not case.failed:
            case.seconds = slowest(case.seconds, device)
            case.result["seconds"] = spread(case.seconds)


def slowest(seconds: list[float], device: torch.device) -> list[float]:
    """Of each step, the time of the rank that took longest."""
    times = torch.tensor(seconds, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return [float(t) for t in times.tolist()]


def _timed(case: Case, device: torch.device) -> None:
    before = _compiled()
    began = now(device)
    case.step()
    case.seconds.append(now(device) - began)
    case.clean()
    if _compiled() != before:
        case.result["compiled_in_timed_steps"] = True


def _first(case: Case, device: torch.device) -> None:
    began = now(device)
    case.step()
    case.result["first_seconds"] = now(device) - began
    case.clean()


def _peak(case: Case, device: torch.device) -> None:
    """Of a second step, so that the weights' gradients are there before: they count as model state."""
    case.clean()
    release(device)
    case.step()
    if device.type != "cuda":
        case.clean()
        return
    case.between()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    case.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    case.result["peak_b"] = (peak - before) / case.unit
    case.result["peak_gib"] = peak / GIB
    case.result["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    case.clean()


def _compiled() -> int:
    """Graphs that torch.compile has made in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
