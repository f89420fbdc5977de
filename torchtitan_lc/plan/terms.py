"""Bytes with a name, an owner, a place and a moment; the planner only adds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 2**30

# Who answers for a term, and what it is called in a report. A name that is not here belongs to the
# attention half of a block.
OWNERS = {
    "parameters": "FSDP2",
    "gradients": "FSDP2",
    "gathered weights": "FSDP2",
    "reduce buffers": "FSDP2",
    "Adam moments": "optimizer",
    "optimizer temporaries": "optimizer",
    "weight gradients": "block",
    "block inputs": "checkpointing",
    "attention outputs": "checkpointing",
    "h1": "block",
    "block output": "block",
    "gradient of the block's output": "block",
    "MLP tile": "ops.tiled",
    "loss tile and head gradients": "ops.loss",
    "final hidden state": "ops.loss",
    "gradient of the hidden state": "ops.loss",
    "batch": "data",
    "rope": "model",
    "fetched ahead": "offload",
    "CUDA context": "driver",
    "NCCL": "NCCL",
    "allocator reserve": "allocator",
}


@dataclass(frozen=True)
class Term:
    """``size`` bytes of ``name``, which ``owner`` answers for."""

    name: str
    size: int

    @property
    def owner(self) -> str:
        return OWNERS.get(self.name, "attention")


@dataclass(frozen=True)
class Moment:
    """What a GPU has allocated at one point of the step."""

    name: str
    terms: tuple[Term, ...]

    @property
    def total(self) -> int:
        return sum(term.size for term in self.terms)

    def largest_first(self) -> list[Term]:
        return sorted((t for t in self.terms if t.size), key=lambda term: -term.size)


def moment(name: str, *parts: Mapping[str, int]) -> Moment:
    """The terms of all ``parts``, those of one name added up."""
    sizes: dict[str, int] = {}
    for part in parts:
        for term, size in part.items():
            sizes[term] = sizes.get(term, 0) + size
    return Moment(name, tuple(Term(term, size) for term, size in sizes.items() if size))
