"""What a step is measured against: kernel calls as they were made, and the matrix products it needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.ceiling import Ceiling, block_parameters, matmul_flops, time_call
from benchmarks.shapes import Call, Counting, StandIn
from torchtitan_lc.attention.kernels import Math
from torchtitan_lc.attention.local import Local
from torchtitan_lc.memory.checkpointing import Mode, checkpoint_block
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.model import Decoder

ARGS = DecoderArgs(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=8)
CPU = torch.device("cpu")


def _calls(mode: Mode) -> Counting:
    model = Decoder(ARGS)
    model.init_weights(0)
    counting = Counting(Math())
    model.execution.strategy = Local(counting)
    block = model.blocks[0]
    block.checkpoint = checkpoint_block(mode)
    h = torch.randn(1, 16, 32, requires_grad=True)
    block(h, model.functions.rope.cos_sin(torch.arange(16).view(1, -1)), None).sum().backward()
    return counting


@pytest.mark.parametrize(("mode", "forwards"), [("none", 1), ("selective", 1), ("full", 2)])
def test_kernel_calls_are_counted_as_often_as_the_mode_runs_them(mode: Mode, forwards: int) -> None:
    shape = (16, 16, 4, 2, 8, True)
    assert _calls(mode).calls == {Call("forward", *shape): forwards, Call("backward", *shape): 1}


def test_flops_are_those_that_a_causal_mask_leaves() -> None:
    square = Call("forward", 1000, 1000, 2, 1, 64, causal=False)
    assert square.flops == 4 * 1000 * 1000 * 2 * 64
    assert Call("forward", 1000, 1000, 2, 1, 64, causal=True).flops == square.flops / 2
    assert Call("backward", 1000, 1000, 2, 1, 64, causal=False).flops == 2.5 * square.flops


def test_matrix_products_count_every_parameter_of_a_blocks_matrices() -> None:
    block = Decoder(ARGS).blocks[0]
    assert block_parameters(ARGS) == sum(p.numel() for p in block.parameters() if p.dim() == 2)
    assert matmul_flops(ARGS, 100, "none") == 6 * 100 * block_parameters(ARGS)
    w2 = sum(p.numel() for name, p in block.named_parameters() if ".w2." in name)
    assert matmul_flops(ARGS, 100, "full") == 100 * (8 * block_parameters(ARGS) - 2 * w2)


def test_the_ceiling_is_the_time_of_all_calls_and_of_the_products() -> None:
    ceiling = Ceiling(ARGS, torch.float32, CPU, matmul_size=32)
    found = ceiling.of(Math(), _calls("full").calls, 16, "full")
    assert found["kernel_calls"] == 3 and found["attention_s"] > 0
    assert found["matmul_s"] == matmul_flops(ARGS, 16, "full") / ceiling.rate


def test_a_call_that_memory_would_not_hold_is_not_tried() -> None:
    call = Call("forward", 1 << 24, 1 << 24, 1, 1, 16, causal=True)
    with pytest.raises(ValueError, match=r"needs about .* GiB are free"):
        time_call(Math(), call, torch.float32, CPU, 1)


def test_the_stand_in_gives_what_a_kernel_gives() -> None:
    q, k = torch.randn(1, 16, 4, 8), torch.randn(1, 16, 2, 8)
    mask: Any = {"causal": True, "scale": 1.0}
    theirs, ours = Math().forward(q, k, k, **mask), StandIn().forward(q, k, k, **mask)
    assert [x.shape for x in ours] == [x.shape for x in theirs]
    grads = StandIn().backward(q, q, k, k, *ours, **mask)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
