"""What a piece of code costs, by running it on the meta device: nothing is computed or allocated there.

    with Meter() as meter:
        x = torch.empty(1, 16384, 4096, device="meta")
        y = some_function(x)
    meter.cost        bytes alive at the fullest moment, matrix FLOP, bytes moved by everything else

Every tensor that an operation makes is counted by its storage from then until it is freed, so the peak is
that of the code as it is written, autograd included. What a kernel allocates and frees inside one
operation is not seen.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_UNWRITTEN = {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided}
_LOOK_UPS = {_aten.nll_loss_forward}  # read one element of each row


@dataclass(frozen=True)
class Cost:
    """peak: bytes alive at once. flops: of matrix products. traffic: bytes read and written by all other
    operations, each run by itself, and what a product in place adds to. calls: operations that would
    start a kernel."""

    peak: int = 0
    flops: int = 0
    traffic: int = 0
    calls: int = 0


class OnMeta(TorchDispatchMode):
    """Runs operations on the meta device, and tells ``ran`` of each."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler, half a second, to keep it away from a mode; nothing is
        compiled under this one."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        result = self.run(func, args, kwargs, inputs)
        self.ran(func, inputs, [x for x in tree_leaves(result) if isinstance(x, Tensor)])
        return result

    def run(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        result = _shape_only(func, args, kwargs, inputs)
        return func(*args, **kwargs) if result is None else result

    def ran(self, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        raise NotImplementedError


class Meter(OnMeta):
    """Counts what is made inside; ``now`` and ``peak`` are bytes. For tensors on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.flops = self.traffic = self.calls = 0
        self._seen: set[int] = set()

    @property
    def cost(self) -> Cost:
        return Cost(self.peak, self.flops, self.traffic, self.calls)

    def restart(self) -> None:
        """Count from here on; the peak, what is alive now included, begins anew."""
        self.peak = self.now
        self.flops = self.traffic = self.calls = 0

    def ran(self, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        there = {x.untyped_storage()._cdata for x in inputs}
        for x in outputs:
            if x.untyped_storage()._cdata not in there:
                self._count(x.untyped_storage())
        packet = func.overloadpacket
        if func.is_view or packet in _UNWRITTEN or packet is _aten.detach:
            return
        self.calls += 1
        flops = _matrix_flops(packet, inputs)
        self.flops += flops
        if not flops:
            read = [] if packet in _LOOK_UPS else inputs
            self.traffic += sum(x.numel() * x.element_size() for x in (*read, *outputs))
        elif packet is _aten.addmm_:
            self.traffic += 2 * outputs[0].numel() * outputs[0].element_size()

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def _shape_only(func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
    """The result of an operation whose shape is plain, or None for any other. torch's own shape rules
    for these are written in Python and import its compiler or sympy, half a second."""
    if func.overloadpacket is _aten.addmm_:
        return inputs[0]
    if func.overloadpacket in _PRODUCTS:
        a, b = inputs[-2:]
        return a.new_empty((*a.shape[:-1], b.shape[-1]))
    if func.overloadpacket is _aten.cat:
        return _joined(*args, **kwargs)
    if func.overloadpacket in _REDUCTIONS:
        return _reduced(*args, **kwargs)
    if func.overloadpacket in _LIKE:
        return torch.empty_like(args[_LIKE[func.overloadpacket]])
    if func.overloadpacket is _aten.nll_loss_forward and args[3] != 0:  # reduced to a number
        return args[0].new_empty(()), args[0].new_empty(())
    if torch.Tag.pointwise not in func.tags or not all(x.is_floating_point() for x in inputs):
        return None
    returns = [str(r.type) for r in func._schema.returns]
    if returns != ["Tensor"] or func.overloadpacket in _COMPARISONS:
        return None
    if "out" in kwargs or func._schema.name.endswith("_"):  # in place
        return kwargs.get("out", args[0])
    deciding = [x for x in inputs if x.dim()] or inputs  # a number does not widen a tensor
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in deciding))
    lengths = [tuple(reversed(x.shape)) for x in inputs]
    shape = [max(sizes, key=lambda n: n != 1) for sizes in zip_longest(*lengths, fillvalue=1)]
    return torch.empty(shape[::-1], dtype=dtype, device="meta")


def _joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    shape = list(parts[0].shape)
    shape[dim] = sum(x.shape[dim] for x in parts)
    return parts[0].new_empty(shape)


def _reduced(
    x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor | None:
    if not (dtype or x.dtype).is_floating_point:
        return None
    axes = {d % x.dim() for d in dim} if dim and x.dim() else set(range(x.dim()))
    shape = [1 if i in axes else n for i, n in enumerate(x.shape) if keepdim or i not in axes]
    return torch.empty(shape, dtype=dtype or x.dtype, device="meta")


_REDUCTIONS = {_aten.mean, _aten.sum}
# Of the same shape as their argument of this number.
_LIKE = {
    _aten._log_softmax: 0,
    _aten._log_softmax_backward_data: 0,
    _aten.nll_loss_backward: 1,
}
_PRODUCTS = {_aten.mm, _aten.bmm, _aten.addmm, _aten.addmm_, _aten.baddbmm}
_COMPARISONS = {
    getattr(_aten, name)
    for name in ("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "logical_not")
}


def is_product(func: Any) -> bool:
    """Of matrices."""
    return func.overloadpacket in _PRODUCTS


def _matrix_flops(packet: Any, inputs: list[Tensor]) -> int:
    """Two for each multiply-add of a matrix product, 0 for anything else."""
    if packet in _PRODUCTS:
        a, b = inputs[-2:]
        return 2 * a.numel() * b.shape[-1]
    return 0
