"""Spread a decoder over ranks and memory: the only place where its config becomes arguments.

The order matters:
1. strategy and tiles   decide which functions run, so everything after wraps those;
2. checkpointing        and offload: wraps a block's two halves from inside it, so that recomputation in
                        backward happens within the FSDP unit, with the weights gathered;
3. float8               exchanges the products inside the tile functions;
4. compile              replaces the pure tile functions, which know nothing of ranks: no graph
                        break at an exchange, one compilation for all layers;
5. FSDP2                last, because it replaces the parameters by shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from torchtitan_lc.attention.base import AttentionShape, Strategy
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.distributed.fsdp import shard_units
from torchtitan_lc.distributed.parallel_dims import Meshes
from torchtitan_lc.memory.activations import set_up_blocks
from torchtitan_lc.memory.placement import Sizes
from torchtitan_lc.models.decoder.float8 import use_float8
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.tools.dtypes import torch_dtype


def parallelize(model: nn.Module, config: JobConfig, strategy: Strategy, meshes: Meshes) -> None:
    assert isinstance(model, Decoder)
    execution = model.execution
    execution.strategy = strategy
    execution.mlp_tokens = config.tiling.mlp_tokens
    execution.loss_tokens = config.tiling.loss_tokens

    blocks, args = model.blocks, model.args
    rows, tokens = config.training.local_batch_size, strategy.layout.tokens(config.training.seq_len)
    itemsize = torch_dtype(config.training.mixed_precision_param).itemsize
    shape = AttentionShape(args.n_heads, args.n_kv_heads, args.head_dim)
    sizes = Sizes(
        input=rows * tokens * args.dim * itemsize,
        outputs=strategy.kept_bytes(shape, rows, tokens, itemsize),
    )
    device = torch.device(meshes.fsdp.device_type)
    elements = sum(p.numel() for p in model.parameters()) // meshes.fsdp.shape[-1]
    shards = elements * torch_dtype(config.training.dtype).itemsize
    run = set_up_blocks(blocks, config, sizes, device, shards)
    model.segments = run.segments
    model.execution.after_attention = run.after_attention
    model.execution.after_last_block = run.after_last

    if config.float8.enable:
        use_float8(model, config.float8)

    if config.compile.enable:
        for functions in {model.functions, *(block.functions for block in blocks)}:
            functions.compile(config.compile.backend)

    sharded = units(model, config.parallelism.fsdp_reshard_after_forward)
    shard_units(
        model,
        [unit.module for unit in sharded],
        meshes.fsdp,
        param_dtype=torch_dtype(config.training.mixed_precision_param),
        reduce_dtype=torch_dtype(config.training.mixed_precision_reduce),
        reshard_after_forward=[unit.frees for unit in sharded],
        cpu_offload=config.training.enable_cpu_offload,
    )


@dataclass(frozen=True)
class Unit:
    """What FSDP2 gathers together. frees: after its forward, to gather it again for backward."""

    name: str
    module: nn.Module
    frees: bool


def units(model: Decoder, reshard_after_forward: str) -> list[Unit]:
    """In the order of forward; all that is in none of them is the root's, which is gathered first and kept.

    Embedding and head are units of their own, unless they share the table: then it belongs to the root.
    "default": backward starts with the head and the last block, so freeing them buys nothing.
    """
    blocks: list[tuple[str, nn.Module]] = [(f"block {i}", b) for i, b in enumerate(model.blocks)]
    named = [*blocks, ("head", model.head)]
    if not model.args.tie_embeddings:
        named.insert(0, ("embedding", model.tok_embeddings))
    always, default = reshard_after_forward == "always", reshard_after_forward == "default"
    kept = {name for name, _ in named[-2:]}
    return [Unit(name, module, always or (default and name not in kept)) for name, module in named]
