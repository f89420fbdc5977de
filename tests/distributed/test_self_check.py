"""The check before training finds what makes context parallelism wrong, and says what and by how much."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import run_distributed
from tests.tiny import register_tiny, tiny_config
from torchtitan_lc.attention import ring
from torchtitan_lc.attention.comm import HeadExchange, Travelling
from torchtitan_lc.attention.layout import Layout
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.trainer import Trainer


def _lose_order() -> None:
    right = HeadExchange.seq_to_heads

    def wrong(self: HeadExchange, packed: Tensor, *, overlap: bool = False) -> Travelling:
        sent = right(self, packed, overlap=overlap)
        if len(self.counts) == 1:
            return sent
        return Travelling(lambda: sent.arrive().roll(1, dims=1))  # every token one place off

    HeadExchange.seq_to_heads = wrong  # type: ignore[method-assign]


def _swap_parts() -> None:
    right = Layout.shard

    def wrong(self: Layout, batch: Any, rank: int) -> Any:
        parts = right(self, batch, rank)
        parts["positions"] = right(self, batch, 0)[
            "positions"
        ]  # every rank believes it is the first
        return parts

    Layout.shard = wrong  # type: ignore[method-assign]


def _merge_without_weights() -> None:
    def wrong(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        out.add_(part)

    ring.merge = wrong


FAULTS: dict[str, tuple[Callable[[], None], dict[str, Any]]] = {
    "exchange": (_lose_order, {"attention.strategy": "upipe"}),
    "positions": (_swap_parts, {"attention.strategy": "ulysses"}),
    "merge": (_merge_without_weights, {"attention.strategy": "ring"}),
}


def _build(
    rank: int, world_size: int, fault: str | None, settings: dict[str, Any], tmp: str
) -> str:
    register_tiny()
    if fault is not None:
        FAULTS[fault][0]()
    chosen = {
        "job.dump_folder": tmp,
        "attention.self_check": True,
        "parallelism.context_parallel_degree": 2,
        **settings,
    }
    try:
        Trainer(tiny_config(chosen), torch.device("cpu")).close()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_stops_the_run_on_every_rank_with_what_differs(fault: str, tmp_path: Any) -> None:
    said = run_distributed(_build, 2, fault, FAULTS[fault][1], str(tmp_path))
    for text in said:
        assert "attention.self_check" in text
        off = [float(x) for x in re.findall(r"off by ([\d.e+-]+)", text)]
        assert off and max(off) > 0.1, text


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (2, {"attention.strategy": "upipe"}),
        (2, {"attention.strategy": "ring", "training.mixed_precision_param": "bfloat16"}),
        (4, {"attention.strategy": "ulysses", "model.flavor": "six"}),
        (
            4,
            {
                "parallelism.context_parallel_degree": 4,
                "parallelism.context_parallel_ulysses_degree": 2,
                "model.flavor": "tied",
                "compile.enable": True,
            },
        ),
    ],
)
def test_a_right_run_passes(world_size: int, settings: dict[str, Any], tmp_path: Any) -> None:
    assert run_distributed(_build, world_size, None, settings, str(tmp_path)) == [""] * world_size
