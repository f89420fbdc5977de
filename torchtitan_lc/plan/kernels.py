"""How inductor turns operations into kernels, as far as that decides which buffers exist at once.

    a product          a kernel of its own
    everything else    one kernel for all that hangs together with no product between; only what another
                       kernel reads, or what leaves, gets a buffer
    a buffer           there from the kernel that writes it to the last that reads it; written over by the
                       result that alone is made from it, where that is of the same dtype and size

Operations work on values, numbered from 0: a value is what one operation makes and never changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor


@dataclass(frozen=True)
class Operation:
    """product: of matrices, or an operation of another library. in_part: of what it reads,
    that of which it reads a part or in another order. reduces: what it makes is smaller than what it reads."""

    reads: frozenset[int]
    makes: tuple[int, ...]
    product: bool = False
    reduces: bool = False
    in_part: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Kernel:
    """reads: values that others made. writes: those of its own that get a buffer, with the value whose
    buffer that was, or None for a new one. frees: what nothing reads after it."""

    reads: frozenset[int]
    writes: Mapping[int, int | None]
    frees: frozenset[int]


def nbytes(value: Tensor) -> int:
    return value.untyped_storage().nbytes()


def needed(
    operations: Sequence[Operation], wanted: Iterable[int], there: Collection[int] = ()
) -> list[Operation]:
    """Those that make ``wanted`` from what is ``there`` and what no operation makes, in their order."""
    found, missing = [], set(wanted)
    for operation in reversed(operations):
        if missing.difference(there).intersection(operation.makes):
            found.append(operation)
            missing |= operation.reads
    return found[::-1]


def saved(
    operations: Sequence[Operation],
    outputs: Collection[int],
    gradients: Collection[int],
    tensors: Sequence[Tensor],
) -> frozenset[int]:
    """Values that forward, which makes ``outputs``, hands to backward.

    Products are not made twice, nor is what a product of backward reads; of the rest what takes least is
    kept, the value or what it is made from. What outputs do not need is left to backward altogether.
    """
    forward = needed(operations, outputs)
    makers = {value: operation for operation in forward for value in operation.makes}
    kept: set[int] = set()

    @cache
    def least(value: int) -> frozenset[int]:
        if value in kept or value not in makers:
            return frozenset()
        if makers[value].product:
            return frozenset({value})
        made_from = frozenset().union(*map(least, makers[value].reads))
        size = sum(nbytes(tensors[v]) for v in made_from)
        return made_from if size < nbytes(tensors[value]) else frozenset({value})

    of_forward = set(forward)
    backward = [op for op in needed(operations, gradients) if op not in of_forward]
    read = {value for op in backward for value in op.reads if value in makers}
    by_products = {value for op in backward if op.product for value in op.reads}
    kept |= {value for value in read if value in by_products or makers[value].product}
    for value in sorted(read - kept):
        kept |= least(value)
        least.cache_clear()
    return frozenset(kept)


def scheduled(
    operations: Sequence[Operation],
    leaving: Collection[int],
    donated: Collection[int],
    tensors: Sequence[Tensor],
) -> list[Kernel]:
    """Kernels in their order. leaving: values that stay when all have run. donated: those made before that
    may be written over, as those made here may. tensors: of every value, its dtype and size."""
    ours = {*donated, *(value for op in operations for value in op.makes)}.difference(leaving)
    groups = _in_order(_groups(_inlined(operations, leaving)))
    last = {value: at for at, group in enumerate(groups) for value in _reads(group)}
    kernels = []
    for at, group in enumerate(groups):
        made = [value for op in group for value in op.makes]
        writes = [value for value in made if value in leaving or value in last]
        dead = {value for value in _reads(group) if last[value] == at and value not in leaving}
        over = {} if group[0].product else _over(group, writes, dead & ours, tensors)
        kernels.append(
            Kernel(_reads(group), {value: over.get(value) for value in writes}, frozenset(dead))
        )
    return kernels


def _inlined(operations: Sequence[Operation], leaving: Collection[int]) -> list[Operation]:
    """Those whose results get a place, with what they read to make them: products, what products read, what
    leaves, and reductions. The rest is made where it is read, each time."""
    makers = {value: op for op in operations for value in op.makes}
    placed = {value for op in operations if op.product for value in op.reads}
    placed.update(leaving)
    placed.update(v for op in operations if op.product or op.reduces for v in op.makes)

    @cache
    def sources(value: int) -> tuple[frozenset[int], frozenset[int]]:
        """What it is made from, and what of that in part."""
        if value in placed or value not in makers:
            return frozenset({value}), frozenset()
        return read_by(makers[value])

    def read_by(op: Operation) -> tuple[frozenset[int], frozenset[int]]:
        reads: set[int] = set()
        in_part: set[int] = set()
        for value in op.reads:
            made_from, partly = sources(value)
            reads |= made_from
            in_part |= made_from if value in op.in_part else partly
        return frozenset(reads), frozenset(in_part)

    found = []
    for op in operations:
        makes = tuple(value for value in op.makes if value in placed)
        if makes:
            reads, in_part = read_by(op)
            found.append(replace(op, reads=reads, makes=makes, in_part=in_part))
    return found


def _reads(group: Sequence[Operation]) -> frozenset[int]:
    """What others made."""
    made = {value for op in group for value in op.makes}
    return frozenset(value for op in group for value in op.reads if value not in made)


def _groups(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Operations of each kernel. Those that are no products are told apart by how many products lie before
    them: of one such stage, none can need another through a product."""
    stages: dict[int, int] = {}
    groups: list[list[Operation]] = []
    fusable: dict[int, list[list[Operation]]] = {}
    for op in operations:
        stage = max((stages.get(value, 0) for value in op.reads), default=0)
        stages.update(dict.fromkeys(op.makes, stage + op.product))
        if op.product:
            groups.append([op])
            continue
        found = fusable.setdefault(stage, [])
        touching = [group for group in found if any(_touch(op, other) for other in group)]
        joined = [*(other for group in touching for other in group), op]
        fusable[stage] = [group for group in found if group not in touching] + [joined]
    return groups + [group for found in fusable.values() for group in found]


def _touch(op: Operation, other: Operation) -> bool:
    """Whether one reads what the other makes, or both read the same."""
    return bool(op.reads & (other.reads | set(other.makes)))


def _in_order(groups: list[list[Operation]]) -> list[list[Operation]]:
    """As their operations were recorded, each after those that make what it reads."""
    makers = {value: n for n, group in enumerate(groups) for op in group for value in op.makes}
    found: dict[int, list[Operation]] = {}

    def visit(n: int) -> None:
        if n in found:
            return
        for value in sorted(_reads(groups[n])):
            if value in makers:
                visit(makers[value])
        found[n] = groups[n]

    for value in sorted(makers):
        visit(makers[value])
    return list(found.values())


def _over(
    group: Sequence[Operation],
    writes: Sequence[int],
    dead: Collection[int],
    tensors: Sequence[Tensor],
) -> dict[int, int]:
    """Buffers that results of a kernel take over: of what is read, in place, for one result and at most for
    others that this one is made from."""
    over: dict[int, int] = {}
    for value in writes:
        first = needed(group, [value])
        for old in sorted(set(dead).difference(over.values())):
            readers = [op for op in group if old in op.reads]
            alone = value in readers[-1].makes and all(op in first for op in readers)
            in_place = not any(old in op.in_part for op in readers)
            if alone and in_place and _alike(tensors[old], tensors[value]):
                over[value] = old
                break
    return over


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and nbytes(a) == nbytes(b)
