"""What FSDP2 and the optimizer hold: shards between steps, and whole units while they are used.

Units are those of models/decoder/parallelize.py. Their life is FSDP2's, read from its source and
checked on real tensors (tests/unit/plan/test_state.py):

    forward     a unit is gathered into one buffer and copied out of it; the buffer is kept until the next
                unit has its own, so that the two can overlap
    backward    a unit is gathered while the one after it works; its gradient is copied into a buffer in the
                reduce dtype, which is kept until the next unit has its own
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from torch import nn

from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.models.decoder.parallelize import units as fsdp_units
from torchtitan_lc.plan.job import Job
from torchtitan_lc.tools.dtypes import torch_dtype


@dataclass(frozen=True)
class Unit:
    """What is gathered together: the shapes of its parameters. keeps: it is not freed after its forward."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    keeps: bool

    def padded(self, shards: int) -> int:
        """Elements, each parameter's first axis rounded up to a multiple of the shards."""
        return _padded(self.shapes, shards)


@lru_cache(maxsize=1024)
def _padded(shapes: tuple[tuple[int, ...], ...], shards: int) -> int:
    return sum(-(-shape[0] // shards) * shards * prod(shape[1:]) for shape in shapes)


def units(model: Decoder, reshard_after_forward: str) -> list[Unit]:
    """In the order of forward. A tied table is the root's, which is gathered first and kept."""
    found = [
        Unit(unit.name, _shapes(unit.module), not unit.frees)
        for unit in fsdp_units(model, reshard_after_forward)
    ]
    if model.args.tie_embeddings:
        found.insert(0, Unit("embedding", _shapes(model.tok_embeddings), True))
    return found


def _shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(p.shape) for p in module.parameters())


class Sharded:
    """Bytes of the shards and of what is gathered, by name."""

    def __init__(self, job: Job) -> None:
        training = job.config.training
        free = job.config.parallelism.fsdp_reshard_after_forward
        self.units = job.model.once(units, job.model.module, free)
        self.tied = job.model.args.tie_embeddings
        self.shards = job.shard
        self.param = torch_dtype(training.mixed_precision_param).itemsize
        self.reduce = torch_dtype(training.mixed_precision_reduce).itemsize
        self.master = torch_dtype(training.dtype).itemsize
        self.on_host = training.enable_cpu_offload
        optimizer = job.config.optimizer
        self.moments = 0 if optimizer.name == "SGD" else 2
        self.moments_on_host = self.on_host or (optimizer.offload_state and self.moments > 0)
        self.implementation = optimizer.implementation
        self.accumulates = job.accumulation > 1
        self.sgd = optimizer.name == "SGD"

    def elements(self, chosen: Sequence[Unit] | None = None) -> int:
        """Of a rank's shards."""
        chosen = self.units if chosen is None else chosen
        return sum(unit.padded(self.shards) for unit in chosen) // self.shards

    @property
    def shard_bytes(self) -> int:
        return self.elements() * self.master

    def between_steps(self) -> dict[str, int]:
        return {
            "parameters": 0 if self.on_host else self.shard_bytes,
            "Adam moments": 0 if self.moments_on_host else self.moments * self.shard_bytes,
        }

    def host(self) -> dict[str, int]:
        """Of one rank."""
        if self.on_host:
            # FSDP2 has torch page-lock each shard and its gradient, which rounds up to a power of two.
            sizes = [self._shard(shape) for unit in self.units for shape in unit.shapes]
            locked = sum(1 << (size - 1).bit_length() for size in sizes)
            return {
                "parameters": locked,
                "gradients": locked,
                "Adam moments": self.moments * self.shard_bytes,
            }
        return {"Adam moments": self.moments * self.shard_bytes if self.moments_on_host else 0}

    def gradients(self, first: int) -> dict[str, int]:
        """While unit ``first`` goes backward: those of the units after it, or of all if they were there
        from the micro-batch before."""
        if self.on_host:
            return {}
        done = self.units if self.accumulates else self.units[first + 1 :]
        if self.tied and not self.accumulates:
            done = [unit for unit in done if unit.name != "embedding"]
        return {"gradients": self.elements(done) * self.master}

    def in_forward(self, index: int) -> dict[str, int]:
        """While unit ``index`` computes."""
        kept = [u for u in self.units[:index] if u.keeps]
        whole = sum(u.padded(self.shards) for u in [*kept, self.units[index]])
        buffer = self.units[index].padded(self.shards) if self.shards > 1 else 0
        before = {"gradients": self.shard_bytes} if self.accumulates and not self.on_host else {}
        return {"gathered weights": (whole + buffer) * self.param, **before}

    def gathering(self, index: int) -> dict[str, int]:
        """While unit ``index`` is copied out of its buffer in forward: that of the unit before is still
        held by the function that gives it up."""
        before = self.units[index - 1].padded(self.shards) if index and self.shards > 1 else 0
        held = self.in_forward(index)
        return {**held, "gathered weights": held["gathered weights"] + before * self.param}

    def in_backward(self, index: int, again: int = 0) -> dict[str, int]:
        """While unit ``index`` computes its gradients, without those. ``again``: units before it that ran
        forward once more, and stay gathered until their own backward."""
        whole = self._gathered_before(index, again) + self.units[index].padded(self.shards)
        after = self.units[index + 1].padded(self.shards) if index + 1 < len(self.units) else 0
        # Autograd adds up both uses of a tied table before FSDP2 sees the gradient.
        table = (
            self.units[0].padded(self.shards) if self.tied and index + 1 < len(self.units) else 0
        )
        return {
            "weight gradients": table * self.param,
            "gathered weights": whole * self.param,
            "reduce buffers": after * self.reduce,
            **self.gradients(index),
        }

    def _gathered_before(self, index: int, again: int) -> int:
        """Elements of units before ``index`` in backward: those kept, those made again, and the next one in
        its buffer."""
        held = [u for i, u in enumerate(self.units[:index]) if u.keeps or i >= index - again]
        ahead = self.units[index - 1] if index and self.shards > 1 else None
        if ahead is not None and ahead not in held:
            held.append(ahead)
        return sum(u.padded(self.shards) for u in held)

    def after_backward(self, index: int, again: int = 0) -> dict[str, int]:
        """While the gradients of unit ``index`` are copied to be reduced: they, the buffer, and the
        shard that comes out."""
        unit = self.units[index]
        whole = self._gathered_before(index, again)
        size = unit.padded(self.shards)
        shard = 0 if self.on_host else size // self.shards * self.reduce
        return {
            "gathered weights": whole * self.param,
            "weight gradients": size * self.param,
            "reduce buffers": size * self.reduce,
            "gradients": self.gradients(index).get("gradients", 0) + shard,
        }

    def _shard(self, shape: tuple[int, ...]) -> int:
        """Bytes of a rank's part of a parameter."""
        return -(-shape[0] // self.shards) * prod(shape[1:]) * self.master

    def in_optimizer(self) -> dict[str, int]:
        """All gradients, and what the update needs beside them."""
        if self.on_host:
            return {}
        shards = [self._shard(shape) for u in self.units for shape in u.shapes if len(shape) > 1]
        temporaries = 0
        if self.moments_on_host:
            temporaries = 4 * max(shards)  # two slots of two moments
        elif self.implementation == "foreach" or (self.sgd and self.implementation == "auto"):
            temporaries = self.shard_bytes
        elif self.implementation == "for-loop":
            # Two of a parameter, and one that its predecessor leaves behind.
            temporaries = max(a + 2 * b for a, b in zip([0, *shards], shards, strict=False))
        return {"gradients": self.shard_bytes, "optimizer temporaries": temporaries}
