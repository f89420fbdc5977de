"""The blocks that are compared: this project's, and the published schedule on the same code.

All share one set of weights, and run alone: without FSDP, head or optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.record import Record
from benchmarks.shapes import Counting, Loss, StandIn, get_kernel, positions_of
from benchmarks.timing import Case
from torchtitan_lc.attention.base import ALONE, Peers
from torchtitan_lc.attention.kernels import Kernel
from torchtitan_lc.attention.staged import StagedStrategy
from torchtitan_lc.attention.strategies import make_strategy
from torchtitan_lc.memory.checkpointing import Mode, checkpoint_block
from torchtitan_lc.memory.host_memory import HostMemory
from torchtitan_lc.memory.offload import CudaCopies, HostCopies, Offload
from torchtitan_lc.memory.placement import LayerPlacement, Sizes, place_layers
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.model import Decoder

PUBLISHED = "published"


@dataclass(frozen=True)
class Setting:
    """What all cases of a run share."""

    args: DecoderArgs
    device: torch.device
    dtype: torch.dtype
    projection_tokens: int
    mlp_tokens: int
    hold_normed_input: bool
    sum_kv_gradients: bool
    overlap_exchange: bool
    early_fetch: bool
    backend: str  # of torch.compile

    @property
    def peers(self) -> Peers:
        return Peers(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


@dataclass(frozen=True)
class Plan:
    """One case. strategy: a name, name:heads_per_stage, or "published" (then the rest but for the
    kernel is the published schedule's)."""

    strategy: str
    mode: str
    kernel: str
    offload: bool = False
    compile: bool = False

    def labels(self) -> Record:
        kind = PUBLISHED if self.strategy == PUBLISHED else "ours"
        return {"kind": kind, **dataclasses.asdict(self)}


def make_weights(setting: Setting) -> dict[str, Tensor]:
    with setting.device:
        model = Decoder(setting.args).to(setting.dtype)
    model.init_weights(0)
    return dict(model.state_dict())


def make_model(setting: Setting, weights: dict[str, Tensor]) -> Decoder:
    with torch.device("meta"):
        model = Decoder(setting.args)
    model.load_state_dict(weights, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_()
    model.execution.mlp_tokens = setting.mlp_tokens
    return model


def our_block(model: Decoder, plan: Plan, setting: Setting, kernel: Kernel) -> StagedStrategy:
    """THE PLACE that says how this project runs a block: strategy, exchange, checkpoint mode, offload."""
    name, _, heads = plan.strategy.partition(":")
    strategy = make_strategy(
        name,
        kernel,
        ulysses=ALONE if name == "ring" else setting.peers,
        ring=setting.peers if name == "ring" else ALONE,
        heads_per_stage=int(heads or 1),
        tile_tokens=setting.projection_tokens,
        hold_normed_input=setting.hold_normed_input,
        sum_kv_gradients=setting.sum_kv_gradients,
        overlap_exchange=setting.overlap_exchange,
    )
    mode, n_layers = cast(Mode, plan.mode), len(model.blocks)
    if plan.offload and n_layers > 1:
        placements = place_layers(n_layers, Sizes(1, 1), mode=mode, host_bytes=2**62)
    else:  # one block stands for any in the middle of a model
        here = plan.offload
        one = LayerPlacement(mode, input_on_host=here, outputs_on_host=here and mode != "none")
        placements = [one] * n_layers
    on_gpu = setting.device.type == "cuda"
    copies = CudaCopies(setting.device) if on_gpu else HostCopies()
    offload = Offload(HostMemory(setting.device), copies, early=setting.early_fetch)
    for block, placement in zip(model.blocks, placements, strict=True):
        store = (partial(offload.block_store, placement),) if plan.offload else ()
        block.checkpoint = checkpoint_block(placement.mode, *store)
    return strategy


def published_block(model: Decoder, setting: Setting, kernel: Kernel) -> StagedStrategy:
    """Untied Ulysses as published: one head per rank and stage, full checkpointing, the block's input
    copied to pinned host memory and back while the device waits, nothing compiled or overlapped.

    The normed input is held, which costs memory and is faster.
    """
    strategy = make_strategy(
        "upipe",
        kernel,
        ulysses=setting.peers,
        heads_per_stage=1,
        tile_tokens=setting.projection_tokens,
        hold_normed_input=True,
    )
    for block in model.blocks:
        block.checkpoint = offloaded_and_recomputed
    return strategy


def offloaded_and_recomputed(fn: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Outside a checkpoint the hooks see its inputs alone."""
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return checkpoint_block("full")(fn, *inputs)


class BlockCase:
    """A model (of one block or a few) under one plan, at any length."""

    def __init__(self, plan: Plan, setting: Setting, weights: dict[str, Tensor]) -> None:
        self.plan, self.setting = plan, setting
        self.counting: Counting | None = None
        device, dtype, head_dim = setting.device, setting.dtype, setting.args.head_dim
        self.kernel = get_kernel(plan.kernel, device, dtype, head_dim)
        self.model = make_model(setting, weights)
        if plan.compile:
            self.model.functions.compile(setting.backend)

    def at(self, seq_len: int, h: Tensor, result: Record) -> Case:
        """h [1, T, M] is a leaf that the cases of a length share."""
        model, setting = self.model, self.setting
        counting = Counting(self.kernel)
        stand_in = isinstance(self.kernel, StandIn)
        self.counting = None if stand_in else counting
        kernel: Any = self.kernel if stand_in else counting
        if self.plan.strategy == PUBLISHED:
            strategy = published_block(model, setting, kernel)
        else:
            strategy = our_block(model, self.plan, setting, kernel)
        model.execution.strategy = strategy
        shape = setting.args
        strategy.plan(shape.n_heads, shape.n_kv_heads)  # says what cannot be, before it is run
        rank = setting.peers.rank
        positions = positions_of(strategy.layout, rank, seq_len, setting.device)
        angles = model.functions.rope.cos_sin(positions)
        result["kernel"] = self.kernel.name

        def step() -> None:
            counting.calls.clear()
            x = h * 1  # as behind another block: nobody else holds it
            for block in model.blocks:
                x = block(x, angles, None)
            loss = Loss.apply(x)
            del x  # nobody holds the output of a model's last block either
            loss.backward()

        def clean() -> None:
            model.zero_grad(set_to_none=True)
            h.grad = None

        def between() -> None:
            h.grad = None

        return Case(result, step, clean, between, unit=h.numel() * 2)


def cut(args: DecoderArgs, layers: int) -> DecoderArgs:
    """The same block without the tables."""
    return dataclasses.replace(args, n_layers=layers, vocab_size=8)
