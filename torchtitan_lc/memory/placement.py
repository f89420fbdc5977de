"""Which layer keeps what, and where: decided once, from sizes alone, before anything is allocated.

The rules, in their order:
1. of block inputs, every ``every``-th is kept (the first of each segment of blocks);
2. with offload, inputs go to the host from the first layer on, as far as its budget reaches; the last
   one stays, as backward begins with it; what does not fit stays on the device;
3. layers that compute attention's outputs again put those of the block at hand on the host;
4. of layers that keep attention's outputs, those of the last go first. What does not fit stays on the
   device if a number of layers was asked for, and is computed again under "auto".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.memory.checkpointing import Mode, layer_modes

Auto = Literal["auto"]
GIB = 1024**3


@dataclass(frozen=True)
class Sizes:
    """Bytes of one layer's input, and of its attention's (out, lse), on one rank."""

    input: int
    outputs: int


@dataclass(frozen=True)
class LayerPlacement:
    """Of one layer: its mode, and whether input and attention outputs go to the host.

    keeps_input: it is the first of its segment.
    """

    mode: Mode
    keeps_input: bool = True
    input_on_host: bool = False
    outputs_on_host: bool = False


def place_layers(
    n_layers: int,
    sizes: Sizes,
    *,
    mode: Mode,
    selective_layers: int | Auto = "auto",
    every: int = 1,
    host_bytes: int = 0,
) -> list[LayerPlacement]:
    """One placement per layer; ``host_bytes``: the host's budget, 0 without offload.

    Raises ValueError for a number of layers that the model does not have.
    """
    auto = selective_layers == "auto"
    wanted = n_layers if selective_layers == "auto" else selective_layers
    modes = layer_modes(mode, wanted, n_layers)
    starts = [layer for layer in range(n_layers) if layer % every == 0]
    if mode == "none" or not host_bytes:
        return [LayerPlacement(modes[i], i in starts) for i in range(n_layers)]

    inputs = starts[:-1][: host_bytes // sizes.input]
    left = host_bytes - len(inputs) * sizes.input
    # Room for what the blocks of one segment compute again, if any will.
    again = min(every, n_layers) * sizes.outputs
    none_again = wanted == n_layers and (not auto or left >= n_layers * sizes.outputs)
    left_to_keep = left if none_again else max(left - again, 0)
    fit = min(wanted, left_to_keep // sizes.outputs) if mode == "selective" else 0
    if auto and mode == "selective":
        modes = layer_modes(mode, fit, n_layers)
    kept = range(n_layers - fit, n_layers)
    recomputed = [i for i in range(n_layers) if modes[i] == "full"] if left >= again else []
    outputs = {*kept, *recomputed}
    return [
        LayerPlacement(modes[i], i in starts, i in inputs, i in outputs) for i in range(n_layers)
    ]


def host_bytes_needed(layers: Sequence[LayerPlacement], sizes: Sizes) -> int:
    """What the host holds at most."""
    inputs = sum(layer.input_on_host for layer in layers) * sizes.input
    kept = sum(layer.outputs_on_host and layer.mode == "selective" for layer in layers)
    again = any(layer.outputs_on_host and layer.mode == "full" for layer in layers)
    starts = [i for i, layer in enumerate(layers) if layer.keeps_input] + [len(layers)]
    longest = max(stop - start for start, stop in pairwise(starts))
    return inputs + (kept + (longest if again else 0)) * sizes.outputs


def host_state(config: JobConfig, parameter_bytes: int) -> int:
    """Bytes of model state that a rank will keep in host memory beside activations.

    parameter_bytes: of its shards. Under training.enable_cpu_offload torch page-locks each shard and its
    gradient, rounded up to a power of two: twice the bytes at most, which is what is set aside.
    """
    moments = 0 if config.optimizer.name == "SGD" else 2 * parameter_bytes
    if config.training.enable_cpu_offload:
        return 4 * parameter_bytes + moments
    return moments if config.optimizer.offload_state else 0


def is_roomy(buffer_bytes: int, device_bytes: int) -> bool:
    """Whether the "auto" of a key that spends a hidden-state buffer to save time spends it: where one
    is at most a 64th of the device's memory."""
    return 64 * buffer_bytes <= device_bytes


def releases_cached(config: JobConfig, buffer_bytes: int, device_bytes: int) -> bool:
    """training.release_cached_memory, where "auto" is the opposite: what it costs is least in long steps."""
    value = config.training.release_cached_memory
    return value if isinstance(value, bool) else not is_roomy(buffer_bytes, device_bytes)
