"""A few blocks whose activations are offloaded by the real wiring, with copies of the test's choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.tiny import FLAVORS, gradients, masked_rows, tiny_config
from torchtitan_lc.attention.base import AttentionShape
from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.attention.kernels import CpuFlash, Kernel
from torchtitan_lc.attention.upipe import UPipe
from torchtitan_lc.memory import activations
from torchtitan_lc.memory.offload import Copies, Offload
from torchtitan_lc.memory.placement import GIB, LayerPlacement, Sizes
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.model import Decoder

LAYERS, ROWS, TOKENS = 3, 1, 32
ARGS = dataclasses.replace(FLAVORS["gqa"], n_layers=LAYERS)
STAGES, HEADS_PER_STAGE = 3, 3  # of 8 heads: 3, 3, 2
CALLS = 5  # of the kernel, as stages cut groups of 2 heads


def sizes(
    args: DecoderArgs = ARGS, rows: int = ROWS, tokens: int = TOKENS, itemsize: int = 4
) -> Sizes:
    """Bytes of a block's input, and of out and lse, on one rank."""
    shape = AttentionShape(args.n_heads, args.n_kv_heads, args.head_dim)
    outputs = UPipe(CpuFlash()).kept_bytes(shape, rows, tokens, itemsize)
    return Sizes(rows * tokens * args.dim * itemsize, outputs)


def build(
    settings: dict[str, Any],
    *,
    copies: Copies | None = None,
    placements: Sequence[LayerPlacement] | None = None,
    host_bytes: int | None = None,
    kernel: Kernel | None = None,
    args: DecoderArgs = ARGS,
    device: str = "cpu",
    bytes_of: Sizes | None = None,
    **strategy: Any,
) -> tuple[Decoder, Offload | None]:
    """The model, and its offload if ``settings`` ("section.key" of the config) switch it on.

    copies: instead of those of the device. placements: instead of the rules'. host_bytes: the budget,
    exactly.
    """
    if host_bytes is not None:
        settings = {**settings, "activation_offload.host_memory_gib": (host_bytes + 0.5) / GIB}
    model = Decoder(args)
    model.init_weights(0)
    model.to(device)
    chosen = {"heads_per_stage": HEADS_PER_STAGE, "tile_tokens": 24, **strategy}
    model.execution.strategy = UPipe(kernel or CpuFlash(), **chosen)
    model.execution.mlp_tokens = 24
    made: list[Offload] = []

    def watched(*arguments: Any, **options: Any) -> Offload:
        made.append(Offload(*arguments, **options))
        return made[-1]

    with ExitStack() as patches:
        patches.enter_context(patch.object(activations, "Offload", watched))
        if copies is not None:
            name = "CudaCopies" if device == "cuda" else "HostCopies"
            patches.enter_context(patch.object(activations, name, lambda *_: copies))
        if placements is not None:
            patches.enter_context(
                patch.object(activations, "place_layers", lambda *_, **__: list(placements))
            )
        run = activations.set_up_blocks(
            model.blocks, tiny_config(settings), bytes_of or sizes(), torch.device(device)
        )
        model.segments = run.segments
        model.execution.after_attention = run.after_attention
        model.execution.after_last_block = run.after_last
    return model, made[0] if made else None


def loss_of(
    model: Decoder, seed: int = 0, packed: bool = False, rows: int = ROWS, tokens: int = TOKENS
) -> Tensor:
    batch = masked_rows(rows, tokens, seed, packed)
    documents = Documents.from_positions(batch["positions"])
    device = model.tok_embeddings.weight.device
    batch = {name: x.to(device) for name, x in batch.items()}
    return model(batch["tokens"], batch["positions"], batch["labels"], documents)


def train(model: Decoder, steps: int = 2, micro_batches: int = 2, **batch: Any) -> list[Tensor]:
    """Every loss, and after each step every gradient; weights move in between.

    batch: what `loss_of` takes.
    """
    seen: list[Tensor] = []
    for step in range(steps):
        for i in range(micro_batches):
            loss = loss_of(model, step * micro_batches + i, **batch)
            loss.backward()
            seen.append(loss.detach())
        seen += [grad.clone() for grad in gradients(model).values()]
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None
    return seen


def assert_same(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    """Bit for bit."""
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert torch.equal(x, y), f"no. {i}: {(x - y).abs().max()}"
