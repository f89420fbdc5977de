"""What a function holds once inductor has compiled it, found without compiling it or importing a compiler.

    fn, run once on the meta device    its operations, forward and backward
    kernels.py                         what forward hands to backward; of each, kernels and buffers
    fused(fn)                          called like fn, holds those buffers

Nothing here knows the functions, so a change of one changes the answer. The rules are those of torch 2.11
and 2.13, read from code that inductor wrote for an H200. Not seen is what a kernel allocates for itself (sums
over rows by parts: 16 MiB at a width of 4096), that an operation written twice is done once, and which of
torch's operations beside products of matrices inductor calls as they are (sorts, convolutions).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._mode_utils import no_dispatch

from torchtitan_lc.plan.kernels import Kernel, Operation, nbytes, needed, saved, scheduled
from torchtitan_lc.tools.meter import OnMeta, is_product

_aten = torch.ops.aten
# Of their argument they read no element.
_LIKE_A_SHAPE = {
    getattr(_aten, name)
    for name in ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
                 "empty_like", "full_like", "ones_like", "zeros_like")
}  # fmt: skip


def fused(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in for ``fn`` compiled, for tensors on the meta device: a tensor or a tuple of them, of the
    same shapes, and the buffers of its kernels while they run and, of what is saved, until backward has."""

    def call(*inputs: Tensor) -> Any:
        compiled = _compiled(fn, inputs)
        if compiled.backward is None:
            found = compiled.forward.run(dict(enumerate(inputs)))
        else:
            found = _Fused.apply(compiled, *inputs)
        return found if compiled.gives_tuple else found[0]

    return call


@dataclass(frozen=True)
class _View:
    """Of a value's buffer."""

    value: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    def of(self, buffer: Tensor) -> Tensor:
        return buffer.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _Graph:
    kernels: list[Kernel]
    results: Sequence[_View | None]
    tensors: Sequence[Tensor]

    def reads(self) -> set[int]:
        """Values that it makes among them."""
        found = {value for kernel in self.kernels for value in kernel.reads}
        return found.union(x.value for x in self.results if x is not None)

    def run(self, buffers: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
        """``buffers`` has those of given values; afterwards, of all that are left."""
        for kernel in self.kernels:
            for value, over in kernel.writes.items():
                buffers[value] = self._new(value) if over is None else buffers[over]
            for value in kernel.frees:
                buffers.pop(value, None)
        return tuple(None if x is None else x.of(buffers[x.value]) for x in self.results)

    def _new(self, value: int) -> Tensor:
        like = self.tensors[value]  # perhaps a part of what it lies in
        return torch.empty(nbytes(like) // like.element_size(), dtype=like.dtype, device="meta")


class _Operations(OnMeta):
    """Records what runs inside, and hides it from modes around it. A value for each storage, and a new one
    when that is written in place; views are values of what they show."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Operation] = []
        self.tensors: list[Tensor] = []  # of each value; held, so that no storage comes twice
        self._values: dict[int, int] = {}

    def value(self, x: Tensor) -> int:
        """One that nothing inside has made is given."""
        known = self._values.get(x.untyped_storage()._cdata)
        return self.new(x) if known is None else known

    def new(self, x: Tensor) -> int:
        self._values[x.untyped_storage()._cdata] = len(self.tensors)
        self.tensors.append(x)
        return len(self.tensors) - 1

    def run(self, *call: Any) -> Any:
        with no_dispatch():
            return super().run(*call)

    def ran(self, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        there = {x.untyped_storage()._cdata for x in inputs}
        read = [] if func.overloadpacket in _LIKE_A_SHAPE else inputs
        reads = [(self.value(x), x.numel()) for x in read]
        made = [
            x for x in outputs if func._schema.is_mutable or x.untyped_storage()._cdata not in there
        ]
        if made:
            largest = max((numel for _, numel in reads), default=0)
            operation = Operation(
                frozenset(value for value, _ in reads),
                tuple(self.new(x) for x in made),
                product=is_product(func) or func.namespace not in ("aten", "prims"),
                reduces=max(x.numel() for x in made) < largest,
                in_part=frozenset(v for v, numel in reads if numel != self.tensors[v].numel()),
            )
            self.found.append(operation)

    def view(self, x: Tensor) -> _View:
        return _View(self.value(x), x.shape, x.stride(), x.storage_offset())

    def graph(
        self,
        results: Sequence[_View | None],
        kept: Collection[int] = (),
        there: Collection[int] = (),
        donated: Collection[int] = (),
    ) -> _Graph:
        """Makes ``results``, and ``kept`` beside, from values that are ``there`` or given."""
        leaving = {*kept, *(x.value for x in results if x is not None)}
        operations = needed(self.found, leaving, there)
        return _Graph(scheduled(operations, leaving, donated, self.tensors), results, self.tensors)


@dataclass(frozen=True)
class _Compiled:
    """Given values are numbered as the inputs, those that come with backward as ``tangents``."""

    gives_tuple: bool
    forward: _Graph
    backward: _Graph | None
    tangents: tuple[int, ...] = ()


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compiled: _Compiled, *inputs: Tensor) -> tuple[Tensor | None, ...]:
        assert compiled.backward is not None
        buffers = dict(enumerate(inputs))
        found = compiled.forward.run(buffers)
        buffers.update(enumerate(inputs))
        # Not among autograd's saved tensors: each is let go when the last kernel that reads it has run.
        ctx.buffers = {v: buffers[v] for v in compiled.backward.reads() if v in buffers}
        ctx.compiled = compiled
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        buffers = ctx.__dict__.pop("buffers")
        for value, grad in zip(ctx.compiled.tangents, grads, strict=True):
            buffers[value] = grad.contiguous()
        return None, *ctx.compiled.backward.run(buffers)


def _alike(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _compiled(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> _Compiled:
    trace = _Operations()
    # Tensors of its own: what autograd keeps of the trace must not keep those that are counted.
    with no_dispatch():
        given = [_alike(x).requires_grad_(x.requires_grad) for x in inputs]
    for x in given:
        trace.new(x)
    with trace:
        found = fn(*given)
    outputs = found if isinstance(found, tuple) else (found,)
    results = [trace.view(y) for y in outputs]
    returned = {y.value for y in results}
    if not any(y.requires_grad for y in outputs):
        return _Compiled(isinstance(found, tuple), trace.graph(results), None)

    with no_dispatch():
        tangents = [torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in outputs]
    coming = tuple(trace.new(x) for x in tangents)
    wanted = [x for x in given if x.requires_grad]
    with trace:
        grads = iter(torch.autograd.grad(outputs, wanted, tangents, allow_unused=True))
    of_inputs = [next(grads) if x.requires_grad else None for x in given]
    gradients = [None if x is None else trace.view(x) for x in of_inputs]
    made = {x.value for x in gradients if x is not None}
    kept = saved(trace.found, returned, made, trace.tensors)
    return _Compiled(
        isinstance(found, tuple),
        trace.graph(results, kept),
        trace.graph(gradients, there=kept, donated=kept - returned),
        coming,
    )
