"""What a block holds at its worst moment, in hidden-state buffers B, as rank 0 of 8.

Real tensors of Llama 3 8B's proportions on torch's fake process group: real shapes and real frees, no
peers. The kernel is a stand-in that allocates what a flash kernel does: its results and dq in fp32 beside
16-bit tensors, twice their size. A change that keeps one buffer more breaks these numbers.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from benchmarks.bench_block import Loss, StandIn
from tests.live_memory import LiveMemory

WIDTH, TOKENS, TILE = 128, 32_768, 256
B = TOKENS * WIDTH * 4  # fp32 stands for the 16 bits of a real run, fp64 for its fp32


def _measure(strategy_name: str, heads_per_stage: int, mode: Any, hold: bool, results: Any) -> None:
    """(peak of forward, kept for backward, peak of backward), each without the block's weights."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from torchtitan_lc.attention.base import Peers
    from torchtitan_lc.attention.strategies import make_strategy
    from torchtitan_lc.memory.checkpointing import checkpoint_block
    from torchtitan_lc.models.decoder.args import DecoderArgs
    from torchtitan_lc.models.decoder.model import Decoder

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    model = Decoder(DecoderArgs(WIDTH, 1, 32, 8, 448, 64))
    model.init_weights(0)
    for parameter in model.parameters():
        # Weight gradients weigh nothing beside rows of a real length; here they would.
        parameter.requires_grad_(False)
    model.execution.strategy = make_strategy(
        strategy_name,
        StandIn(wide=torch.float64),
        ulysses=Peers(8, 0, dist.group.WORLD),
        heads_per_stage=heads_per_stage,
        tile_tokens=TILE,
        hold_normed_input=hold,
    )
    model.execution.mlp_tokens = TILE
    model.blocks[0].checkpoint = checkpoint_block(mode)
    positions = torch.arange(TOKENS).view(1, -1)
    before = torch.zeros(1, TOKENS, WIDTH, requires_grad=True)
    with LiveMemory() as live:
        h = before * 1  # as after another block
        y = model.blocks[0](h, positions, None)
        del h
        forward = live.peak
        loss = Loss.apply(y)
        del y
        kept = live.now
        live.restart()
        loss.backward()
    results.put((forward / B, kept / B, live.peak / B))


@pytest.mark.parametrize(
    ("strategy", "heads", "mode", "hold", "forward", "kept", "backward"),
    [
        # lse: one number for 4 of q's, so 1/4 of out's size with a head size of 4; 1/128 in a real run
        ("upipe", 1, "selective", False, 4.45, 2.35, 6.8),
        ("upipe", 1, "full", False, 3.35, 1.1, 6.8),
        ("upipe", 2, "selective", False, 4.45, 2.35, 7.85),
        ("ulysses", 1, "selective", False, 4.45, 2.35, 10.35),
        ("upipe", 1, "selective", True, 4.5, 2.35, 7.8),
    ],
)
def test_a_block_holds_no_more_than_its_schedule_needs(
    strategy: str,
    heads: int,
    mode: str,
    hold: bool,
    forward: float,
    kept: float,
    backward: float,
) -> None:
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    worker = context.Process(target=_measure, args=(strategy, heads, mode, hold, results))
    worker.start()
    got = results.get(timeout=60)
    worker.join()
    for what, value, bound in zip(
        ("forward", "kept", "backward"), got, (forward, kept, backward), strict=True
    ):
        assert bound - 0.1 <= value <= bound, f"{what}: {value:.2f} B"
