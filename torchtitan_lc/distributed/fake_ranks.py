"""One process as rank 0 of many that are not there: torch's fake process group.

Collectives return at once and send nothing. What should have arrived is a copy of what this process sent.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

# Elements that one sends and gets, in shares of a rank; torch 2.13 has new names for two of them.
_COLLECTIVES = {
    "all_to_all_single": ("all", "all"),
    "all_gather_into_tensor": ("one", "all"),
    "all_gather_single": ("one", "all"),
    "reduce_scatter_tensor": ("all", "one"),
    "reduce_scatter_single": ("all", "one"),
}


@contextmanager
def fake_ranks(ranks: int, device: torch.device) -> Iterator[None]:
    """Inside, this process is rank 0 of ``ranks``."""
    before = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}
    join_fake_ranks(ranks, device)
    try:
        yield
    finally:
        dist.destroy_process_group()
        for name, call in before.items():
            setattr(dist, name, call)


def join_fake_ranks(ranks: int, device: torch.device) -> None:
    """The same for the rest of the process's life."""
    # Part of torch's testing package, which a plain import of torch leaves out.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    _have_peers_answer(device)


def _have_peers_answer(device: torch.device) -> None:
    """Some releases' fake group leaves what should have arrived as it was: old memory, NaNs among it,
    which kernels may compute faster or slower. There, what arrives is a copy of what was sent."""
    elements = {"one": 1, "all": dist.get_world_size()}
    for name, (sends, gets) in _COLLECTIVES.items():
        if not hasattr(dist, name):
            continue
        arrived = torch.zeros(elements[gets], device=device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of the old names
            getattr(dist, name)(arrived, torch.ones(elements[sends], device=device))
        if not arrived.all():
            setattr(dist, name, answering(getattr(dist, name)))


def answering(call: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that fills its output with what it sends, again and again, then does ``call``."""
    takes = inspect.signature(call)

    @wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        output, sent, *_ = takes.bind(*args, **kwargs).arguments.values()
        source = sent.reshape(-1)
        for part in output.view(-1).split(source.numel()):
            part.copy_(source[: part.numel()])
        return call(*args, **kwargs)

    return wrapped
