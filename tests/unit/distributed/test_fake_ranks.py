"""One process as rank 0 of many."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from torchtitan_lc.distributed import fake_ranks as module
from torchtitan_lc.distributed.fake_ranks import answering, fake_ranks


def test_silent_peers_are_answered_for() -> None:
    calls = []

    def silent(output: torch.Tensor, input: torch.Tensor, group: object = None) -> str:
        calls.append(group)
        return "work"

    sent, arrived, part = torch.arange(4.0), torch.zeros(8), torch.zeros(2)
    assert answering(silent)(arrived, input=sent, group="g") == "work"
    assert answering(silent)(part, sent) == "work"
    assert arrived.tolist() == [0, 1, 2, 3, 0, 1, 2, 3] and part.tolist() == [0, 1]
    assert calls == ["g", None]


def test_every_collective_brings_something_and_is_itself_again_afterwards() -> None:
    names = [name for name in module._COLLECTIVES if hasattr(dist, name)]
    before = {name: getattr(dist, name) for name in names}
    with fake_ranks(4, torch.device("cpu")):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 4)
        for name in names:
            sends, gets = (4 if n == "all" else 1 for n in module._COLLECTIVES[name])
            arrived = torch.zeros(gets)
            getattr(dist, name)(arrived, torch.full((sends,), 5.0))
            assert arrived.tolist() == [5.0] * gets, name
    assert not dist.is_initialized()
    assert {name: getattr(dist, name) for name in names} == before


def test_an_error_inside_ends_the_group_too() -> None:
    with pytest.raises(ZeroDivisionError), fake_ranks(4, torch.device("cpu")):
        1 / 0  # noqa: B018
    assert not dist.is_initialized()
