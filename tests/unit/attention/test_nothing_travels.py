"""What is under way between ranks, and when: no heads beside a kernel, the same exchanges on every rank, and
copies from the host behind what is computed meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lc.attention.base import Peers
from torchtitan_lc.attention.half import AttentionHalf
from torchtitan_lc.attention.kernels.stand_in import StandIn
from torchtitan_lc.attention.upipe import UPipe
from torchtitan_lc.memory.checkpointing import Mode, checkpoint_block
from torchtitan_lc.memory.host_memory import HostMemory
from torchtitan_lc.memory.offload import HostCopies, Offload
from torchtitan_lc.memory.placement import Sizes, place_layers
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.model import Decoder

TOKENS, HEAD_DIM = 8, 4
NOTED: dict[str, Callable[..., Any]] = {
    "query": AttentionHalf.project_query,
    "gradient of output": AttentionHalf.output_backward,
    "gradient of query": AttentionHalf.projection_backward,  # of key and value behind it
}


@dataclass
class Record:
    """events in their order on the host; exchanges: sizes received and sent, by rank; travelling: how many
    have been started and not waited for."""

    events: list[str] = field(default_factory=list)
    exchanges: list[tuple[list[int], list[int]]] = field(default_factory=list)
    travelling: int = 0

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        receive_sizes: list[int],
        send_sizes: list[int],
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        self.events.append("exchange")
        self.exchanges.append((receive_sizes, send_sizes))
        received.zero_()
        if not async_op:
            return None
        self.travelling += 1
        return _Work(self)

    def named(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.events.append(name)
            return fn(*args, **kwargs)

        return call


class _Work:
    def __init__(self, record: Record) -> None:
        self._record = record

    def wait(self) -> None:
        self._record.travelling -= 1


class Watched(StandIn):
    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._kernel()
        return super().forward(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        self._kernel()
        return super().backward(*args, **kwargs)

    def _kernel(self) -> None:
        self._record.events.append("kernel")
        assert self._record.travelling == 0, "beside a kernel"


class Copies(HostCopies):
    def __init__(self, record: Record) -> None:
        self._record = record

    def back(self, *args: Any) -> Any:
        self._record.events.append("fetch")
        return super().back(*args)


def one_step(
    monkeypatch: pytest.MonkeyPatch,
    heads: tuple[int, int, int],
    rank: int = 0,
    ranks: int = 4,
    mode: Mode = "selective",
    **strategy: Any,
) -> Record:
    """Forward and backward of two blocks as ``rank`` saw them. heads: query, KV, and those of a stage."""
    record = Record()
    monkeypatch.setattr(dist, "all_to_all_single", record.all_to_all)
    n, kv, per_stage = heads
    model = Decoder(DecoderArgs(n * HEAD_DIM, 2, n, kv, 16, 16))
    model.init_weights(0)
    group: Any = object()  # nothing is sent
    model.execution.strategy = UPipe(
        Watched(record),
        ulysses=Peers(ranks, rank, group),
        heads_per_stage=per_stage,
        tile_tokens=4,
        **strategy,
    )
    for name, method in NOTED.items():
        monkeypatch.setattr(AttentionHalf, method.__name__, record.named(name, method))
    offload = Offload(HostMemory(torch.device("cpu")), Copies(record), early=False)
    for block, place in zip(
        model.blocks, place_layers(2, Sizes(1, 1), mode=mode, host_bytes=100), strict=True
    ):
        block.checkpoint = checkpoint_block(mode, partial(offload.block_store, place))
    h = torch.zeros(1, TOKENS, n * HEAD_DIM, requires_grad=True) + 0
    cos_sin = model.functions.rope.cos_sin(torch.arange(TOKENS).view(1, -1))
    for block in model.blocks:
        h = block(h, cos_sin, None)
    record.events.append("backward")
    h.sum().backward()
    assert record.travelling == 0
    return record


SHAPES = [(8, 8, 1), (8, 2, 1), (6, 2, 1), (6, 3, 2), (14, 2, 2)]
SWITCHES = [
    dict(zip(("overlap_exchange", "sum_kv_gradients", "hold_normed_input"), on, strict=True))
    for on in itertools.product((False, True), repeat=3)
]


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("heads", SHAPES)
def test_no_heads_travel_beside_a_kernel_and_ranks_exchange_the_same(
    heads: tuple[int, int, int], mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    for switches in SWITCHES:
        seen = [one_step(monkeypatch, heads, rank, mode=mode, **switches) for rank in range(4)]
        assert any(record.events.count("kernel") for record in seen)
        for at_once in zip(*(record.exchanges for record in seen), strict=True):
            for a, b in itertools.product(range(4), repeat=2):
                assert at_once[a][0][b] == at_once[b][1][a], f"what {b} sends {a}"


def between_kernels(record: Record) -> list[list[str]]:
    """What happened in backward from a block's first kernel to its second; two stages are all."""
    backward = record.events[record.events.index("backward") :]
    kernels = [at for at, event in enumerate(backward) if event == "kernel"]
    return [backward[a + 1 : b] for a, b in zip(kernels[::2], kernels[1::2], strict=True)]


def test_overlapped_exchanges_have_projections_before_they_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """dq leaves, the next stage's heads are projected and leave, and only then dq becomes a gradient."""
    for overlap in (False, True):
        record = one_step(monkeypatch, (8, 8, 1), overlap_exchange=overlap)
        for order in between_kernels(record):
            begins = order.index("exchange")
            made = order.index("gradient of query")
            assert begins < min(made, order.index("query"))
            assert (order.index("gradient of output") < made) == overlap


@pytest.mark.parametrize("overlap", [False, True])
def test_outputs_come_from_the_host_behind_a_projection(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = one_step(monkeypatch, (8, 8, 1), overlap_exchange=overlap)
    for order in between_kernels(record):
        assert order.index("fetch") < order.index("query") < order.index("gradient of output")
