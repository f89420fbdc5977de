"""How many bytes of tensors are alive, exactly, on a CPU.

Every tensor that an operation returns is counted by its storage from then until it is freed. What a
kernel allocates and frees inside one operation is not seen.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """``now`` and ``peak``: bytes of the tensors made inside, beside ``base`` that were there before."""

    def __init__(self, base: int = 0) -> None:
        super().__init__()
        self.now = self.peak = base
        self._seen: set[int] = set()

    def ignore(self, tensors: list[torch.Tensor]) -> None:
        """They were there before: views of them cost nothing."""
        self._seen |= {x.untyped_storage()._cdata for x in tensors}

    def restart(self) -> None:
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self._count(x.untyped_storage())
        return result

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
