"""A block of a decoder on the meta device as rank 0 of many, its exchanges replaced by nothing: real shapes,
real frees, no peers, no time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from torchtitan_lc.attention import comm, ring
from torchtitan_lc.memory.host_memory import HostBuffer, HostMemory
from torchtitan_lc.memory.offload import HostCopies
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.tools.meter import Meter


class _Arrived:
    def wait(self) -> None: ...


class _NoPeers:
    """In place of torch.distributed: what is received is allocated by its caller, and stays as it is."""

    isend = irecv = None
    ProcessGroup = object

    def all_to_all_single(self, *_: Any, **__: Any) -> _Arrived:
        return _Arrived()

    def get_global_rank(self, *_: Any) -> int:
        return 0

    def P2POp(self, *args: Any) -> Any:
        return args

    def batch_isend_irecv(self, calls: list[Any]) -> list[Any]:
        return []


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (comm, ring):
        monkeypatch.setattr(module, "dist", _NoPeers())


@dataclass(frozen=True)
class Peaks:
    """Bytes beside the weights: of forward, kept for backward, of backward."""

    forward: int
    kept: int
    backward: int


class _Loss(torch.autograd.Function):
    """Follows the block and keeps nothing; its backward makes the gradient of the block's output."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.like = (y.shape, y.dtype)
        return y.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype, device="meta")


class Elsewhere(HostMemory):
    """Host memory that the meter does not see."""

    def take(self, n_bytes: int) -> HostBuffer:
        with _disable_current_modes():
            return HostBuffer(torch.empty(n_bytes, dtype=torch.uint8, device="meta"))


NO_COPIES = HostCopies()  # of tensors without data


def measure(
    run: Callable[[Tensor, Tensor], Tensor], rows: int, tokens: int, width: int, head_dim: int
) -> Peaks:
    """Of ``run(what comes before, cosines and sines)``, counted from its own input on."""
    cos_sin = torch.empty((rows, tokens, head_dim), device="meta")
    before = torch.empty(
        (rows, tokens, width), dtype=torch.bfloat16, device="meta", requires_grad=True
    )
    with Meter() as live:
        y = run(before, cos_sin)
        forward = live.peak
        loss = _Loss.apply(y)
        del y
        kept = live.now
        live.restart()
        loss.backward()
        before.grad = None
    return Peaks(forward, kept, live.peak)


def run_blocks(model: Decoder, before: Tensor, cos_sin: Tensor) -> Tensor:
    """As Decoder.forward does, and as FSDP2 does a block's gradients leave when its backward has ended."""

    def run(start: int, stop: int, h: Tensor, cos_sin: Tensor, documents: None) -> Tensor:
        for block in model.blocks[start:stop]:
            if h.requires_grad:
                h.register_hook(partial(_drop_gradients, block))
            h = block(h, cos_sin, documents)
        return h

    h = before * 1  # as after another block
    for start, stop in model._segments():
        segment = model.segments[start]
        if segment is None:
            # One after the other, where nothing else holds the first h.
            for index in range(start, stop):
                h = run(index, index + 1, h, cos_sin, None)
        else:
            h = segment(partial(run, start, stop), h, cos_sin, None)
    return h


def _drop_gradients(block: nn.Module, _: Tensor) -> None:
    for parameter in block.parameters():
        parameter.grad = None
