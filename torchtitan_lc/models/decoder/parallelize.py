"""Spread a decoder over ranks and memory: the only place where its config becomes arguments.

The order matters:
1. strategy and tiles   decide which functions run, so everything after wraps those;
2. checkpointing        wraps a block's two halves from inside the block, so that recomputation in
                        backward happens within the FSDP unit, with the weights gathered;
3. compile              replaces the pure tile functions, which know nothing of ranks: no graph
                        break at an exchange, one compilation for all layers;
4. FSDP2                last, because it replaces the parameters by shards.
"""

from __future__ import annotations

from torch import nn

from torchtitan_lc.attention.base import Strategy
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.distributed.fsdp import shard_units
from torchtitan_lc.distributed.parallel_dims import Meshes
from torchtitan_lc.memory.checkpointing import checkpoint_block, layer_modes
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.tools.dtypes import torch_dtype


def parallelize(model: nn.Module, config: JobConfig, strategy: Strategy, meshes: Meshes) -> None:
    assert isinstance(model, Decoder)
    execution = model.execution
    execution.strategy = strategy
    execution.mlp_tokens = config.tiling.mlp_tokens
    execution.loss_tokens = config.tiling.loss_tokens

    blocks = model.blocks
    ac = config.activation_checkpoint
    modes = layer_modes(ac.mode, ac.selective_layers, len(blocks))
    for block, mode in zip(blocks, modes, strict=True):
        block.checkpoint = checkpoint_block(mode)

    if config.compile.enable:
        model.functions.compile(config.compile.backend)

    # Embedding and head are units of their own, unless they share the table: then it belongs to the root.
    tied = model.args.tie_embeddings
    units = [*blocks, model.head] if tied else [model.tok_embeddings, *blocks, model.head]
    free = config.parallelism.fsdp_reshard_after_forward
    # "default": backward starts with the head and the last block, so freeing them buys nothing.
    reshard = [free == "always" or (free == "default" and unit not in units[-2:]) for unit in units]
    shard_units(
        model,
        units,
        meshes.fsdp,
        param_dtype=torch_dtype(config.training.mixed_precision_param),
        reduce_dtype=torch_dtype(config.training.mixed_precision_reduce),
        reshard_after_forward=reshard,
    )
