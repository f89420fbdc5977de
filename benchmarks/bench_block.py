"""One transformer block, forward and backward: time and memory under strategies and schedules.

    PYTHONPATH=. python benchmarks/bench_block.py --name block_8b_1m --seq_len 1M --ranks 8 \
        --strategies upipe:1 upipe:4 ulysses --modes selective full

One process stands for rank 0 of --ranks on torch's fake process group: real shapes, allocations and
kernels, but no peers, so exchanges take no time and what arrives is meaningless. Under torchrun the
ranks are real (--ranks must be their number). Without FSDP: the block's weights are whole.

Per case it records seconds of forward + backward (median of --steps after a warm-up) and, on a GPU, the peak
of allocated memory in B = tokens of the rank x width x 2 bytes, counted from the block's own input on: without
the weights, with the gradient of its output. Kernel "stand-in" allocates what a flash kernel
does and computes nothing, for lengths whose attention takes hours. A case that fails is recorded with its
error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.record import RESULTS, environment, spread, write
from torchtitan_lc.attention.base import Peers
from torchtitan_lc.attention.kernels import choose_kernel
from torchtitan_lc.attention.strategies import make_strategy
from torchtitan_lc.config.token_count import parse_token_count
from torchtitan_lc.memory.checkpointing import checkpoint_block
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.models.llama3 import FLAVORS
from torchtitan_lc.tools.hardware import device_type


class StandIn:
    """Allocates the results of a flash kernel, and in backward dq in ``wide`` beside them."""

    name = "stand-in"

    def __init__(self, wide: torch.dtype = torch.float32) -> None:
        self.wide = wide

    def unsupported(self, *_: Any) -> None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        lse = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        return torch.zeros_like(q), lse

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        return torch.zeros_like(q, dtype=self.wide).to(q.dtype), dk, dv


class Loss(torch.autograd.Function):
    """Follows the block and keeps nothing; its backward makes the gradient of the block's output."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.like = (y.shape, y.dtype, y.device)
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        shape, dtype, device = ctx.like
        return torch.ones(shape, dtype=dtype, device=device)


@dataclasses.dataclass(frozen=True)
class Setting:
    flavor: str
    seq_len: int
    kernel: str
    projection_tokens: int
    mlp_tokens: int
    hold_normed_input: bool
    steps: int
    dtype: torch.dtype


def run_case(setting: Setting, strategy: str, mode: Any, device: torch.device) -> dict[str, Any]:
    """``strategy``: a name, or name:heads_per_stage."""
    name, _, heads = strategy.partition(":")
    args = dataclasses.replace(FLAVORS[setting.flavor], n_layers=1, vocab_size=8)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    kernel: Any = StandIn()
    if setting.kernel != "stand-in":
        kernel = choose_kernel(
            setting.kernel, device_type=device.type, dtype=setting.dtype, head_dim=args.head_dim
        ).kernel
    with device:
        model = Decoder(args).to(setting.dtype)
    model.init_weights(0)
    model.execution.strategy = make_strategy(
        name,
        kernel,
        ulysses=Peers(ranks, rank, dist.group.WORLD),
        heads_per_stage=int(heads or 1),
        tile_tokens=setting.projection_tokens,
        hold_normed_input=setting.hold_normed_input,
    )
    model.execution.mlp_tokens = setting.mlp_tokens
    block = model.blocks[0]
    block.checkpoint = checkpoint_block(mode)
    tokens = setting.seq_len // ranks
    positions = torch.arange(rank * tokens, (rank + 1) * tokens, device=device).view(1, -1)

    leaf = torch.randn(1, tokens, args.dim, device=device, dtype=setting.dtype).requires_grad_()

    def step() -> float:
        model.zero_grad(set_to_none=True)
        leaf.grad = None
        began = _now(device)
        Loss.apply(block(leaf * 1, positions, None)).backward()  # * 1: as behind another block
        return _now(device) - began

    step()
    seconds = [step() for _ in range(setting.steps)]
    result: dict[str, Any] = {"seconds": spread(seconds), "kernel": kernel.name}
    if device.type == "cuda":
        model.zero_grad(set_to_none=True)
        leaf.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        unit = tokens * args.dim * 2
        result["peak_b"] = (torch.cuda.max_memory_allocated() - before) / unit
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        result["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return result


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def join(ranks: int, kind: str) -> torch.device:
    """Real ranks under torchrun, else this process as rank 0 of ``ranks`` fake ones."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    if dist.get_world_size() != ranks:
        raise SystemExit(f"--ranks {ranks}, but {dist.get_world_size()} are running")
    return device


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", required=True)
    parser.add_argument("--flavor", default="8B", choices=FLAVORS)
    parser.add_argument("--seq_len", type=parse_token_count, required=True)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--strategies", nargs="+", default=["upipe:1"])
    parser.add_argument("--modes", nargs="+", default=["selective"])
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--projection_tokens", type=parse_token_count, default=16384)
    parser.add_argument("--mlp_tokens", type=parse_token_count, default=16384)
    parser.add_argument("--hold_normed_input", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    device = join(args.ranks, device_type())
    setting = Setting(
        flavor=args.flavor,
        seq_len=args.seq_len,
        kernel=args.kernel,
        projection_tokens=args.projection_tokens,
        mlp_tokens=args.mlp_tokens,
        hold_normed_input=args.hold_normed_input,
        steps=args.steps,
        dtype=getattr(torch, args.dtype),
    )
    cases = []
    for strategy in args.strategies:
        for mode in args.modes:
            case: dict[str, Any] = {"strategy": strategy, "mode": mode}
            try:
                case |= run_case(setting, strategy, mode, device)
            except (RuntimeError, ValueError) as error:  # out of memory is a result, too
                case["error"] = str(error).splitlines()[0]
            cases.append(case)
            if dist.get_rank() == 0:
                print(json.dumps(case), flush=True)
    if dist.get_rank() == 0:
        peers = "real ranks" if "RANK" in os.environ else "one process as rank 0, fake group"
        shown = {k: str(v) for k, v in dataclasses.asdict(setting).items()}
        result = {**environment(), "ranks": args.ranks, "peers": peers, **shown, "cases": cases}
        write(args.name, result, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
