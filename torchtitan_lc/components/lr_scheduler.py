"""The learning rate as a function of the step, and of nothing else.

    factor
      1 |      ______________
        |    /                \\
        |  /                    \\   linear | sqrt | cosine
    min |/                        \\_ _ _ _
        +------+--------------+---------+---> step
         warm-up    stable       decay   total

``lr(step) = optimizer.lr * lr_factor(step, ...)`` has no memory, so a resumed run goes on exactly
where the unbroken one would be. When ``training.steps`` differs between two runs of the same job
(100, then 150), the second run computes the whole schedule from the new length: step 101 gets the
rate that a 150-step run has at step 101, which may lie above the rate that step 100 ended with. Set
``lr_scheduler.total_steps`` once to keep the schedule's length apart from ``training.steps``.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.optim.lr_scheduler import LambdaLR

if TYPE_CHECKING:
    from torchtitan_lc.config.job_config import LRScheduler as LRSchedulerConfig


def lr_factor(
    step: int,
    warmup_steps: int,
    total_steps: int,
    decay_ratio: float | None,
    decay_type: str,
    min_lr_factor: float,
) -> float:
    """What the peak learning rate is multiplied by in the update after ``step`` completed ones.

    Warm-up rises linearly and never gives 0: update 1 of W uses 1/W. The decay takes
    ``decay_ratio`` of ``total_steps`` and lies at the end; None lets it begin right after the
    warm-up. A warm-up longer than the run is cut to the run, and a decay that would reach into the
    warm-up is cut to what is left. As in TorchTitan the curve reaches ``min_lr_factor`` one step
    after the last update, so that the last update still moves the weights; from then on it stays.
    Without a decay (``decay_ratio`` 0) the full rate stays.

    Raises ValueError for an unknown ``decay_type``.
    """
    warmup_steps = min(warmup_steps, total_steps)
    room = total_steps - warmup_steps
    decay_steps = room if decay_ratio is None else min(round(total_steps * decay_ratio), room)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decay_start = total_steps - decay_steps  # the last update at the full rate
    if step <= decay_start or decay_steps == 0:
        return 1.0
    progress = min((step - decay_start) / decay_steps, 1.0)
    if decay_type == "linear":
        curve = 1.0 - progress
    elif decay_type == "sqrt":
        curve = 1.0 - math.sqrt(progress)
    elif decay_type == "cosine":
        curve = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        raise ValueError(f"lr_scheduler.decay_type = {decay_type!r}: use linear, sqrt or cosine")
    return min_lr_factor + (1.0 - min_lr_factor) * curve


def build_lr_scheduler(
    optimizer: torch.optim.Optimizer, lr_scheduler_config: LRSchedulerConfig, training_steps: int
) -> LambdaLR:
    """One ``lr_factor`` for all parameter groups; call ``step()`` after each optimizer step.

    The schedule's length is ``lr_scheduler.total_steps`` where given, else ``training_steps``. That
    warm-up or decay are cut by it is said before the launch (config/no_effect.py).
    """
    config = lr_scheduler_config
    total_steps = training_steps if config.total_steps is None else config.total_steps
    factor = partial(
        lr_factor,
        warmup_steps=config.warmup_steps,
        total_steps=total_steps,
        decay_ratio=config.decay_ratio,
        decay_type=config.decay_type,
        min_lr_factor=config.min_lr_factor,
    )
    return LambdaLR(optimizer, factor)


def continue_at(scheduler: LambdaLR, step: int) -> None:
    """Put the scheduler, and the optimizer's groups, where ``step`` completed updates leave them.

    The rates come from this run's config, not from the run that wrote the checkpoint.
    """
    scheduler.last_epoch = step
    rates = [
        base * factor(step)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates  # what get_last_lr() answers until the next step()
