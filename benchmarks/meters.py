"""What one process that stands for a rank of many cannot show by itself: traffic, and the time of all layers.

Traffic is counted by wrapping functions while a context is entered; what is counted runs as it would.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from benchmarks.record import read

GATHERS = ("all_gather_into_tensor", "all_gather_single")  # torch 2.11, 2.13
REDUCES = ("reduce_scatter_tensor", "reduce_scatter_single")


@dataclass
class Traffic:
    """Bytes that left this rank: exchanges of heads, and FSDP's gathers and reductions."""

    exchange: int = 0
    fsdp: int = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        def counted(name: str) -> Callable[..., Any]:
            call = getattr(dist, name)
            takes = inspect.signature(call)

            def wrapped(*args: Any, **kwargs: Any) -> Any:
                named = takes.bind(*args, **kwargs).arguments
                sent = next(x for key, x in named.items() if key.startswith("input"))
                self._add(name, sent, dist.get_world_size(named.get("group")))
                return call(*args, **kwargs)

            return wrapped

        with ExitStack() as stack:
            for name in ("all_to_all_single", *GATHERS, *REDUCES):
                if hasattr(dist, name):
                    stack.enter_context(patch.object(dist, name, counted(name)))
            yield

    def _add(self, name: str, sent: Tensor, ranks: int) -> None:
        n_bytes = sent.numel() * sent.element_size()
        if name in GATHERS:
            self.fsdp += n_bytes * (ranks - 1)
        elif name in REDUCES:
            self.fsdp += n_bytes * (ranks - 1) // ranks
        else:
            self.exchange += n_bytes * (ranks - 1) // ranks


def exchange_gbps(text: str) -> float:
    """GB/s out of a rank: a number, or a file that exchange.py wrote (of its largest buffer)."""
    if not text.endswith(".json"):
        return float(text)
    line = max(read(Path(text))["all_to_all"], key=lambda line: line["mib"])
    return float(line["gbps"]["median"])


def extrapolated(times: dict[int, list[float]], layers: int) -> float | None:
    """Seconds of ``layers`` layers from two cuts of the model, time being linear in the number of
    layers; None without two cuts."""
    if len(times) < 2:
        return None
    (few, a), (many, b) = sorted(times.items())[-2:]
    per_layer = (median(b) - median(a)) / (many - few)
    return median(b) + (layers - many) * per_layer
