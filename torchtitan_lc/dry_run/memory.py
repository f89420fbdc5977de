"""Bytes of the device's memory: the CUDA allocator's own figures, or tensors counted one by one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GIB = 2**30


def shown(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{1024 * size / GIB:.2f} MiB"


class DeviceBytes(Protocol):
    """now: allocated. peak: the most of it since ``restart``. reserved: the most that the allocator held; None
    where there is none. Raises torch.OutOfMemoryError in the code that runs when there is no more."""

    @property
    def now(self) -> int: ...
    @property
    def peak(self) -> int: ...
    @property
    def reserved(self) -> int | None: ...
    def restart(self) -> None: ...
    def hold(self, tensors: Iterable[Tensor]) -> None:
        """They are on the device, though nothing that is watched has made them."""


class CudaBytes:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reserved = 0
        torch.cuda.empty_cache()  # of an earlier run in this process
        torch.cuda.reset_peak_memory_stats(device)

    @property
    def now(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    @property
    def reserved(self) -> int | None:
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device))
        return self._reserved

    def restart(self) -> None:
        self._reserved = self.reserved or 0
        torch.cuda.reset_peak_memory_stats(self._device)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        pass


@contextmanager
def at_most(limit: int, device: torch.device) -> Iterator[None]:
    """Inside, torch's allocator on ``device`` gets no more than ``limit`` bytes."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


class CountedBytes(TorchDispatchMode):
    """Every tensor that an operation makes inside, by its storage from then until it is freed or, as FSDP2
    does, resized. What a kernel allocates within one operation is not seen."""

    reserved = None

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._others: set[int] = set()  # storages of other memory
        self._counts = True

    def restart(self) -> None:
        self.peak = self.now

    def hold(self, tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            self._see(x.untyped_storage())

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What is made inside lies in other memory than the device's."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """A resize is no operation: seen only inside."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._change(storage._cdata, size)
            return result

        with patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its own dispatch comes back with the shards
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            for x in tree_leaves(result):
                if isinstance(x, Tensor):
                    self._see(x.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes or key in self._others:
            return
        weakref.finalize(storage, self._forget, key)
        if self._counts:
            self._change(key, storage.nbytes())
        else:
            self._others.add(key)

    def _change(self, key: int, size: int) -> None:
        wanted = self.now + size - self._sizes.get(key, 0)
        if wanted > self.limit:
            raise torch.OutOfMemoryError(
                f"{shown(size)} beside the {shown(self.now)} that are allocated exceed {shown(self.limit)}"
            )
        self._sizes[key], self.now = size, wanted
        self.peak = max(self.peak, wanted)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
        self._others.discard(key)
