"""Building a model on the meta device in a moment: its initialisation, which has nothing to fill, is left
out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Module = TypeVar("Module", bound=nn.Module)


class _NoInit(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def built_on_meta(build: Callable[[], Module]) -> Module:
    with torch.device("meta"), _NoInit():
        return build()
