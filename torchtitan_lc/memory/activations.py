"""A model's blocks under activation checkpointing and offload, as the configuration asks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.distributed.reduce import max_over_ranks
from torchtitan_lc.memory.checkpointing import (
    LayerStore,
    Run,
    checkpoint_block,
    checkpoint_segment,
)
from torchtitan_lc.memory.host_memory import HostMemory, available_bytes
from torchtitan_lc.memory.offload import CudaCopies, HostCopies, Offload
from torchtitan_lc.memory.placement import (
    GIB,
    LayerPlacement,
    Sizes,
    host_bytes_needed,
    host_state,
    is_roomy,
    place_layers,
    releases_cached,
)
from torchtitan_lc.ops.recompute import is_first_run
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.hardware import device_memory
from torchtitan_lc.tools.logging import logger


class CheckpointedBlock(Protocol):
    checkpoint: Run


@dataclass(frozen=True)
class Blocks:
    """segments: for each block, what runs the segment that begins with it; None where every block keeps its
    own input, and inside a segment. To be called with the hidden state in forward: after_attention between
    the halves of every block, after_last when the last block has run."""

    segments: list[Run | None]
    after_attention: Callable[[Tensor], None]
    after_last: Callable[[Tensor], None]


def resolve(value: bool | str, buffer_bytes: int, device_type: str) -> bool:
    """A key that spends a hidden-state buffer of ``buffer_bytes`` to save time."""
    if isinstance(value, bool):
        return value
    return is_roomy(buffer_bytes, _least(device_memory(device_type)))


def releases_memory(config: JobConfig, buffer_bytes: int, device: torch.device) -> bool:
    """Whether this rank gives back what torch's allocator does not use (training.release_cached_memory)."""
    if device.type != "cuda":
        return False
    return releases_cached(config, buffer_bytes, _least(device_memory(device.type)))


def set_up_blocks(
    blocks: Sequence[CheckpointedBlock],
    config: JobConfig,
    sizes: Sizes,
    device: torch.device,
    parameter_bytes: int = 0,
) -> Blocks:
    """Give each block its checkpoint, and say how a model has to run them. parameter_bytes: of this
    rank's shards.

    Raises UserError where the host has less memory than the plan needs.
    """
    ac = config.activation_checkpoint
    available = 0
    if config.activation_offload.enable:
        # Nothing of the model is there yet when its blocks are set up.
        room = available_bytes(_ranks_on_node()) - host_state(config, parameter_bytes)
        available = max(_least(room), 0)
    placements = place_layers(
        len(blocks),
        sizes,
        mode=ac.mode,
        selective_layers=ac.selective_layers,
        every=ac.block_inputs_every,
        host_bytes=host_budget(config, available),
    )
    offload = None
    if config.activation_offload.enable:
        offload = _new_offload(config, placements, sizes, available, device)
    segments: list[Run | None] = []
    for block, placement in zip(blocks, placements, strict=True):
        block.checkpoint = checkpoint_block(placement.mode, *_block_store(offload, placement))
        alone = ac.mode == "none" or ac.block_inputs_every == 1
        starts = placement.keeps_input and not alone
        segments.append(checkpoint_segment(*_segment_store(offload, placement)) if starts else None)
    release = releases_memory(config, sizes.input, device)

    def release_in_backward(h: Tensor) -> None:
        """When backward has come to ``h``: of the head, or of a block's MLP half, tiles and gradients have
        been allocated and freed that attention's large buffers do not fit into."""
        if release and h.requires_grad and is_first_run():
            h.register_hook(lambda _: torch.cuda.empty_cache())

    def after_last(h: Tensor) -> None:
        if offload is not None:
            offload.settle()
        release_in_backward(h)

    return Blocks(segments, release_in_backward, after_last)


def _block_store(
    offload: Offload | None, placement: LayerPlacement
) -> tuple[()] | tuple[Callable[[LayerStore | None], LayerStore]]:
    return () if offload is None else (lambda segment: offload.block_store(placement, segment),)


def _segment_store(
    offload: Offload | None, placement: LayerPlacement
) -> tuple[()] | tuple[Callable[[], LayerStore]]:
    return () if offload is None else (lambda: offload.segment_store(placement),)


def host_budget(config: JobConfig, available: int) -> int:
    """Bytes of host memory that a rank may use for activations, of those that it may take; 0 without
    offload."""
    settings = config.activation_offload
    if not settings.enable:
        return 0
    if settings.host_memory_gib != "auto":
        return int(settings.host_memory_gib * GIB)
    if config.debug.share_offload_buffers:
        return 2**62  # whatever the job's hosts have: this one holds a buffer of each size
    return available * 9 // 10


def _new_offload(
    config: JobConfig,
    placements: Sequence[LayerPlacement],
    sizes: Sizes,
    available: int,
    device: torch.device,
) -> Offload:
    shared = config.debug.share_offload_buffers
    needed = host_bytes_needed(placements, sizes)
    if needed > available and not shared:
        raise UserError(
            f"activation_offload.host_memory_gib = {config.activation_offload.host_memory_gib}: the plan "
            f"takes {needed / GIB:.1f} GiB of host memory for this rank, but only "
            f"{available / GIB:.1f} GiB are free for it; lower host_memory_gib, or set "
            "activation_checkpoint.block_inputs_every or selective_layers to keep less"
        )
    early = resolve(config.activation_offload.early_fetch, sizes.input, device.type)
    kept = {"inputs": 0, "outputs": 0, "again": 0}
    for placement in placements:
        kept["inputs"] += placement.input_on_host
        kept["outputs"] += placement.outputs_on_host and placement.mode == "selective"
        kept["again"] += placement.mode == "full"
    logger.info(
        f"Activations: {kept['inputs']} block inputs and {kept['outputs']} attention outputs of "
        f"{len(placements)} layers go to the host, {needed / GIB:.1f} GiB per rank; attention runs "
        f"again in {kept['again']} layers; fetched {'during' if early else 'after'} the kernel before"
    )
    if shared:
        logger.warning(
            "debug.share_offload_buffers: layers share their host buffers, the gradients are wrong"
        )
    copies = CudaCopies(device) if device.type == "cuda" else HostCopies()
    return Offload(HostMemory(device, shared=shared), copies, early=early)


def _least(value: int) -> int:
    """The smallest of all ranks' values. What follows from it decides how often attention runs, and so
    how many exchanges there are: ranks that decided for themselves would wait for one another."""
    if not dist.is_initialized():
        return value
    return -int(max_over_ranks(torch.tensor(-value)))


def _ranks_on_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
