"""What blocks hold at their worst moment, in hidden-state buffers B, as rank 0 of 8.

Real tensors of Llama 3 8B's proportions on torch's fake process group: real shapes and real frees, no
peers. The kernel is a stand-in that allocates what a flash kernel does: its results, and in fp32, twice the
size of 16-bit tensors, dq and with grouped heads dk and dv. A change that keeps one buffer more breaks these
numbers.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from tests.live_memory import LiveMemory

WIDTH, TOKENS, TILE, BLOCKS = 128, 32_768, 1024, 3
B = TOKENS * WIDTH * 4  # fp32 stands for the 16 bits of a real run, fp64 for its fp32


@dataclass(frozen=True)
class Case:
    strategy: str = "upipe"
    heads: int = 1
    mode: Any = "selective"
    hold: bool = False
    sum_kv: bool = False
    offload: bool = True
    every: int = 1
    early: bool = False
    overlap: bool = False
    split: bool = False  # large backward calls, as those of long rows are


def _measure(case: Case, results: Any) -> None:
    """(peak of forward, kept for backward, peak of backward) of some blocks, without their weights and
    what is on the host; and how many tensors came back from there."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from benchmarks.shapes import Loss, StandIn
    from torchtitan_lc.attention.base import Peers
    from torchtitan_lc.attention.strategies import make_strategy
    from torchtitan_lc.memory.checkpointing import checkpoint_block, checkpoint_segment
    from torchtitan_lc.memory.host_memory import HostMemory
    from torchtitan_lc.memory.offload import HostCopies, Offload
    from torchtitan_lc.memory.placement import Sizes, place_layers
    from torchtitan_lc.models.decoder.args import DecoderArgs
    from torchtitan_lc.models.decoder.model import Decoder

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    model = Decoder(DecoderArgs(WIDTH, BLOCKS, 32, 8, 448, 64))
    model.init_weights(0)
    for parameter in model.parameters():
        # Weight gradients weigh nothing beside rows of a real length; here they would.
        parameter.requires_grad_(False)
    model.execution.strategy = make_strategy(
        case.strategy,
        StandIn(wide=torch.float64),
        ulysses=Peers(8, 0, dist.group.WORLD),
        heads_per_stage=case.heads,
        tile_tokens=TILE,
        hold_normed_input=case.hold,
        sum_kv_gradients=case.sum_kv,
        overlap_exchange=case.overlap,
    )
    if case.split:
        kernel: Any = model.execution.strategy.kernel
        kernel.whole = 0
    model.execution.mlp_tokens = TILE
    memory = HostMemory(torch.device("cpu"))
    copies = HostCopies()
    brought_back = []
    back = copies.back
    copies.back = lambda *args: brought_back.append(1) or back(*args)  # type: ignore
    offload = Offload(memory, copies, early=case.early)
    placements = place_layers(
        BLOCKS,
        Sizes(1, 1),
        mode=case.mode,
        every=case.every,
        host_bytes=100 if case.offload else 0,
    )
    for i, (block, place) in enumerate(zip(model.blocks, placements, strict=True)):
        block.checkpoint = checkpoint_block(place.mode, partial(offload.block_store, place))
        if case.every > 1 and place.keeps_input:
            model.segments[i] = checkpoint_segment(partial(offload.segment_store, place))
    angles = model.functions.rope.cos_sin(torch.arange(TOKENS).view(1, -1))
    before = torch.zeros(1, TOKENS, WIDTH, requires_grad=True)
    live = LiveMemory()
    live.ignore(list(model.parameters()))
    with live:
        h = before * 1  # as after another block
        for start, stop in model._segments():
            segment = model.segments[start]
            if segment is not None:
                h = segment(partial(model._run_blocks, start, stop), h, angles, None)
                continue
            for block in model.blocks[start:stop]:
                h = block(h, angles, None)
        forward = live.peak - memory.allocated
        loss = Loss.apply(h)
        del h
        offload.settle()
        kept = live.now - memory.allocated
        live.restart()
        loss.backward()
    peaks = forward / B, kept / B, (live.peak - memory.allocated) / B
    results.put((*peaks, len(brought_back)))


INPUTS, OUTPUTS = BLOCKS - 1, BLOCKS * 4 * 2  # out and lse of 4 stages
# After the block's output is made again, out of all stages but the first waits on the host for its turn.
AGAIN = BLOCKS * 3


@pytest.mark.parametrize(
    ("case", "forward", "kept", "backward", "brought_back"),
    [
        # lse: one number for 4 of q's, so 1/4 of out's size with a head size of 4; 1/128 in a real run
        (Case(), 4.7, 1.05, 5.6, INPUTS + OUTPUTS + AGAIN),
        (Case(mode="full"), 3.45, 1.05, 5.6, INPUTS + 2 * AGAIN),
        (Case(sum_kv=True), 4.7, 1.05, 6.1, INPUTS + OUTPUTS + AGAIN),
        (Case(hold=True), 4.7, 1.05, 6.6, INPUTS + OUTPUTS + AGAIN),
        (Case(heads=2), 4.7, 1.05, 8.2, INPUTS + OUTPUTS // 2 + BLOCKS),
        (Case(heads=2, split=True), 4.7, 1.05, 7.45, INPUTS + OUTPUTS // 2 + BLOCKS),
        (Case(strategy="ulysses"), 4.7, 1.05, 11.3, INPUTS + BLOCKS * 2),
        (Case(strategy="ulysses", split=True), 4.7, 1.05, 9.55, INPUTS + BLOCKS * 2),
        (Case(early=True), 4.7, 1.05, 7.85, INPUTS + OUTPUTS),
        (Case(early=True, overlap=True), 4.7, 1.05, 7.9, INPUTS + OUTPUTS),
        (Case(overlap=True), 4.7, 1.05, 6.65, INPUTS + OUTPUTS + AGAIN),
        (Case(every=2), 4.7, 1.05, 6.6, None),
        (Case(every=2, mode="full"), 4.45, 1.05, 6.6, None),
        (Case(offload=False), 9.2, 6.8, 11.05, 0),
        (Case(offload=False, mode="full"), 5.45, 3.05, 8.55, 0),
    ],
    ids=str,
)
def test_blocks_hold_no_more_than_their_schedule_needs(
    case: Case, forward: float, kept: float, backward: float, brought_back: int | None
) -> None:
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    worker = context.Process(target=_measure, args=(case, results))
    worker.start()
    *got, came = results.get(timeout=60)
    worker.join()
    for what, value, bound in zip(
        ("forward", "kept", "backward"), got, (forward, kept, backward), strict=True
    ):
        assert bound - 0.1 <= value <= bound, f"{what}: {value:.2f} B"
    assert brought_back in (None, came)
