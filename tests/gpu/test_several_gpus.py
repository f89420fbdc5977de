"""Equality with one rank over NCCL: what gloo blesses must be right on GPUs too.

Runs on all GPUs of the machine, at most four; with four, Ulysses around a ring (USP) and UPipe around a
ring are 2 x 2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.test_training_equals_one_process import ROWS, SEQ, check, strategies
from tests.helpers import run_distributed
from tests.tiny import masked_rows, register_tiny
from torchtitan_lc.attention.base import ALONE, Peers
from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.attention.kernels import choose_kernel
from torchtitan_lc.attention.local import Local
from torchtitan_lc.attention.strategies import make_strategy
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.model import Attention, Functions

pytestmark = pytest.mark.gpu

NCCL = "cpu:gloo,cuda:nccl"


def _gpus() -> int:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    return 4 if count >= 4 else 2


def _table(rank: int, world_size: int, tmp: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    register_tiny()
    rows = masked_rows(ROWS, SEQ)
    packed = masked_rows(ROWS, SEQ, packed=True)
    base = {"training.global_batch_size": ROWS, "job.dump_folder": tmp, "attention.kernel": "math"}
    cp = {**base, "parallelism.context_parallel_degree": world_size}
    device = f"cuda:{rank}"
    ring = {"attention.strategy": "ring"}
    for flavor in ("gqa", "one_kv", "six", "tied"):
        for strategy in (*strategies(world_size)[:2], ring):
            check({**cp, **strategy, "model.flavor": flavor}, rows, device)
            check({**cp, **strategy, "model.flavor": flavor}, packed, device)
    for mode in ("none", "full"):
        check({**cp, "activation_checkpoint.mode": mode}, packed, device)
    if world_size == 4:
        around = {**cp, "parallelism.context_parallel_ulysses_degree": 2}
        for strategy in strategies(world_size)[:2]:
            check({**around, **strategy}, rows, device)
            check({**around, **strategy, "training.local_batch_size": 2}, packed, device)
    for degrees in ({}, {"parallelism.data_parallel_replicate_degree": 2}):
        check({**base, **degrees}, rows, device)


def test_loss_and_every_gradient_equal_one_process_in_fp32(tmp_path: Any) -> None:
    run_distributed(_table, _gpus(), str(tmp_path), timeout=280, backend=NCCL)


def _kernels(rank: int, world_size: int) -> list[str]:
    """Llama 3 8B's attention on 8K tokens in bf16 with the machine's own kernel."""
    args = DecoderArgs(4096, 1, 32, 8, 64, 64)
    functions = Functions(args)
    device = torch.device("cuda", rank)
    attention = Attention(args, functions).to(device)
    generator = torch.Generator().manual_seed(0)
    for weight in attention.parameters():
        weight.data = torch.randn(weight.shape, generator=generator).to(device) / 64
    attention.to(torch.bfloat16)
    scale = torch.ones(args.dim, device=device, dtype=torch.bfloat16)
    tokens = 8192
    x = torch.randn(1, tokens, args.dim, generator=generator).bfloat16()
    dy = torch.randn(1, tokens, args.dim, generator=generator).bfloat16()
    everyone = Peers(world_size, rank, dist.group.WORLD)
    plans = [("ulysses", everyone, ALONE), ("upipe", everyone, ALONE), ("ring", ALONE, everyone)]
    if world_size == 4:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        rings = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        ulysses = Peers(2, rank % 2, pairs[rank // 2])
        ring = Peers(2, rank // 2, rings[rank % 2])
        plans += [("ulysses", ulysses, ring), ("upipe", ulysses, ring)]
    used = []
    for packed in (False, True):
        starts = [0, 1, 1000, 2048, 5000] if packed else [0]
        positions = torch.cat(
            [torch.arange(b - a) for a, b in zip(starts, [*starts[1:], tokens], strict=True)]
        ).view(1, -1)
        documents = Documents.from_positions(positions)
        choice = choose_kernel(
            "auto", device_type="cuda", dtype=torch.bfloat16, head_dim=128, packed=packed
        )
        used.append(choice.kernel.name)

        def run(
            strategy: Any, rank: int, documents: Any = documents, positions: Any = positions
        ) -> list[torch.Tensor]:
            cut = strategy.layout.ranges(rank, tokens)
            mine = [torch.cat([t[:, a:b] for a, b in cut], 1).to(device) for t in (x, dy)]
            where = strategy.layout.shard({"p": positions}, rank)["p"].to(device)
            leaf = mine[0].requires_grad_()
            places = functions.rope.cos_sin(where)
            y = strategy.attend(leaf, places, attention.projections(scale), documents)
            grads = torch.autograd.grad(y, [leaf, *attention.parameters()], mine[1])
            return [y.detach(), *grads]

        want = run(Local(choice.kernel), 0)
        for name, ulysses_peers, ring_peers in plans:
            strategy = make_strategy(
                name, choice.kernel, ulysses=ulysses_peers, ring=ring_peers, heads_per_stage=1
            )
            place = ring_peers.rank * ulysses_peers.ranks + ulysses_peers.rank
            got = run(strategy, place)
            for i, (mine, whole) in enumerate(zip(got, want, strict=True)):
                if i < 2:
                    parts = [torch.empty_like(mine) for _ in range(world_size)]
                    dist.all_gather(parts, mine.contiguous())
                    total = strategy.layout.unshard(parts)
                else:
                    total = mine.float()
                    dist.all_reduce(total)
                error = ((total - whole).norm() / whole.norm()).item()
                # bf16 keeps 8 bits; sums over stages, hops and ranks are rounded in another order.
                assert error < 1e-2, (name, packed, i, error)
    return used


def test_the_machines_own_kernel_gives_what_one_gpu_gives() -> None:
    used = run_distributed(_kernels, _gpus(), timeout=280, backend=NCCL)
    print("kernels:", used[0])
