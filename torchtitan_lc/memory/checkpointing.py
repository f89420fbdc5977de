"""Activation checkpointing of a block: what is kept for backward, what is computed again.

    mode        kept per block                    attention cost, in forward passes of its kernel
    none        block input, out, lse, h1         1 + 2.5
    selective   block input, out, lse             1 + 2.5       same numbers, bit for bit
    full        block input                       1 + 1 + 2.5

Selective records and replays (ops/recompute.py): the first forward hands (out, lse) to a tape, the
recomputation takes them back instead of running the kernel again. At long context attention is nearly
all of the time, so that is the one large lever.

Built on torch's non-reentrant checkpoint, inside the FSDP unit: the gathered weights are there when
backward recomputes the block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchtitan_lc.ops.recompute import Tape, recording, replaying

Mode = Literal["none", "full", "selective"]


def layer_modes(mode: Mode, selective_layers: int, n_layers: int) -> list[Mode]:
    """The mode of each layer: under "selective" the last ``selective_layers`` (-1: all) keep
    attention's output and the others are "full".

    Raises ValueError for a number of layers that the model does not have.
    """
    if mode != "selective" or selective_layers == -1:
        return [mode] * n_layers
    if not 0 <= selective_layers <= n_layers:
        raise ValueError(
            f"activation_checkpoint.selective_layers = {selective_layers}: this model has {n_layers} "
            f"layers, so say a number from 0 to {n_layers}, or -1 for all"
        )
    full: list[Mode] = ["full"] * (n_layers - selective_layers)
    return full + ["selective"] * selective_layers


def checkpoint_block(mode: Mode) -> Callable[..., Tensor]:
    """A function ``run(fn, *inputs)`` that runs a block's ``fn`` under ``mode``."""
    if mode == "none":
        return _run_plainly

    def contexts() -> tuple[Any, Any]:
        tape = Tape() if mode == "selective" else None
        return recording(tape), replaying(tape)

    def run(fn: Callable[..., Tensor], *inputs: Any) -> Tensor:
        # No block draws random numbers, so no generator state has to be kept or restored.
        return checkpoint(
            fn, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )

    return run


def _run_plainly(fn: Callable[..., Tensor], *inputs: Any) -> Tensor:
    return fn(*inputs)
