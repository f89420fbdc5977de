"""A ring: results of hops are summed in fp32 and rounded once, and transfers run beside the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers import run_distributed
from torchtitan_lc.attention.kernels import CpuFlash, Kernel, Math
from torchtitan_lc.attention.layout import Layout
from torchtitan_lc.attention.ring import Ring

S, N, M, D = 64, 4, 2, 16
CASE: dict[str, Any] = {"causal": True, "scale": D**-0.5}


def _inputs(dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, dout of a whole row, with values of ``dtype``."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, S, heads, D) for heads in (N, M, M, N)]
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def _run(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """out, dq, dk, dv."""
    out, lse = kernel.forward(q, k, v, **CASE)
    return [out, *kernel.backward(dout, q, k, v, out, lse, **CASE)]


def _errors(rank: int, world_size: int) -> dict[torch.dtype, list[float]]:
    """Relative errors of out, dq, dk and dv of a ring of all ranks, against fp64."""
    layout = Layout(ring=world_size)
    kernel = Ring(CpuFlash(), ranks=world_size, rank=rank, group=dist.group.WORLD)
    found: dict[torch.dtype, list[float]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        whole = _inputs(dtype)
        parts = [torch.cat([x[:, a:b] for a, b in layout.ranges(rank, S)], dim=1) for x in whole]
        want = _run(Math(), *(x.double() for x in whole))
        found[dtype] = []
        for mine, expected in zip(_run(kernel, *parts), want, strict=True):
            gathered = [torch.empty_like(mine) for _ in range(world_size)]
            dist.all_gather(gathered, mine)
            error = (layout.unshard(gathered).double() - expected).norm() / expected.norm()
            found[dtype].append(error.item())
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_error_of_out_and_of_every_gradient_does_not_grow_with_the_ring(ranks: int) -> None:
    found = run_distributed(_errors, ranks)[0]
    assert max(found[torch.float32]) <= 1e-6, found
    whole = _inputs(torch.bfloat16)
    alone = _run(CpuFlash(), *whole)
    want = _run(Math(), *(x.double() for x in whole))
    names = ("out", "dq", "dk", "dv")
    for name, error, got, exact in zip(names, found[torch.bfloat16], alone, want, strict=True):
        without = ((got.double() - exact).norm() / exact.norm()).item()
        # Parts and their sum are rounded, instead of the result alone: a little more, once.
        assert error <= 1.3 * without, (name, error, without)


def _order(rank: int, world_size: int) -> list[str]:
    """What happens in which order in one forward and backward of a ring."""
    events: list[str] = []

    class Watched(CpuFlash):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            events.append("kernel")
            return super().forward(*args, **kwargs)

        def backward(self, *args: Any, **kwargs: Any) -> Any:
            events.append("kernel")
            return super().backward(*args, **kwargs)

    send = dist.batch_isend_irecv

    def watched_send(calls: Any) -> Any:
        events.append("send")
        return send(calls)

    dist.batch_isend_irecv = watched_send  # type: ignore[assignment]
    ring = Ring(Watched(), ranks=world_size, rank=rank, group=dist.group.WORLD)
    q, k, v, dout = torch.randn(4, 1, 8, 2, 8)
    out, lse = ring.forward(q, k, v, causal=False, scale=0.3)
    events.append("backward")
    ring.backward(dout, q, k, v, out, lse, causal=False, scale=0.3)
    return events


def test_k_and_v_are_on_their_way_before_each_kernel_is_called() -> None:
    """On a GPU a transfer that is posted after a kernel waits for it."""
    for events in run_distributed(_order, 3):
        forward, backward = " ".join(events).split(" backward ")
        assert forward == "send kernel send kernel kernel"
        # k, v; then, behind each kernel but before the next, the gradients that it has added to.
        assert backward == "send kernel send send kernel send kernel send"
