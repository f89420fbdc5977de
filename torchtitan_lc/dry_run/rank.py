"""The Trainer as a dry run builds it: its steps inside a context that counts tensors, or fakes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from torchtitan_lc.attention.kernels import Kernel
from torchtitan_lc.components.metrics import MetricsProcessor
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.trainer import Batch, StepResult, Trainer

Context = Callable[[], AbstractContextManager[Any]]
Fill = Callable[[nn.Module], None]


class Rank(Trainer):
    """stepping: entered for each step. arrived: gets the tensors of each micro-batch, which are read and cut
    outside of it, on the host. fill: in place of memory and first values for the shards."""

    def __init__(
        self,
        config: JobConfig,
        device: torch.device,
        kernel: Kernel,
        *,
        stepping: Context,
        arrived: Callable[[list[Tensor]], None],
        fill: Fill | None = None,
    ) -> None:
        self._stepping, self._arrived, self._fill_otherwise = stepping, arrived, fill
        super().__init__(config, device)
        self.strategy.use_kernel(kernel)

    def _fill(self, module: nn.Module) -> None:
        (self._fill_otherwise or super()._fill)(module)

    def train_step(self, metrics: MetricsProcessor) -> StepResult:
        with self._stepping():
            return super().train_step(metrics)

    def _next_batches(self, metrics: MetricsProcessor) -> tuple[list[Batch], int, int]:
        with _disable_current_modes():
            batches, mine, all_ = super()._next_batches(metrics)
        for batch in batches:
            self._arrived([batch.tokens, batch.positions, batch.labels])
        return batches, mine, all_
