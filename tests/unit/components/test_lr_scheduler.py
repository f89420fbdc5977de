"""The schedule's shape, and that it is a function of the step alone."""

import itertools
import math

import pytest
import torch

from torchtitan_lc.components.lr_scheduler import build_lr_scheduler, continue_at, lr_factor
from torchtitan_lc.config.job_config import LRScheduler

PEAK = 0.5


def run(config: LRScheduler, training_steps: int, first: int = 0) -> list[float]:
    """The rates that updates first+1 .. training_steps use, in a run resumed after ``first``."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [parameter]}], lr=PEAK)
    scheduler = build_lr_scheduler(optimizer, config, training_steps)
    if first:
        continue_at(scheduler, first)
    rates = []
    for _ in range(first, training_steps):
        assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_warm_up_is_linear_and_the_first_update_is_not_lost() -> None:
    factors = [lr_factor(step, 4, 100, None, "linear", 0.0) for step in range(5)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_without_warm_up_the_first_update_has_the_full_rate() -> None:
    assert lr_factor(0, 0, 10, None, "linear", 0.0) == 1.0


def test_without_decay_ratio_decay_starts_right_after_the_warm_up() -> None:
    factors = [lr_factor(step, 2, 12, None, "linear", 0.0) for step in range(2, 12)]
    assert factors == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_decay_ratio_leaves_a_stable_stretch_and_decays_at_the_end() -> None:
    factors = [lr_factor(step, 2, 20, 0.25, "linear", 0.0) for step in range(20)]
    assert factors[2:16] == [1.0] * 14
    assert factors[16:] == pytest.approx([0.8, 0.6, 0.4, 0.2])


def test_a_decay_that_would_reach_into_the_warm_up_is_cut_to_what_is_left() -> None:
    cut = [lr_factor(step, 6, 10, 0.9, "cosine", 0.1) for step in range(10)]
    assert cut == [lr_factor(step, 6, 10, None, "cosine", 0.1) for step in range(10)]


@pytest.mark.parametrize(
    ("decay_type", "middle"),
    [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)],
)
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_each_decay_falls_from_the_peak_to_the_floor_and_stays(
    decay_type: str, middle: float, floor: float
) -> None:
    factors = [lr_factor(step, 0, 100, None, decay_type, floor) for step in range(130)]
    assert factors[0] == 1.0
    assert factors[50] == pytest.approx(floor + (1 - floor) * middle)
    assert factors[100:] == pytest.approx([floor] * 30)
    assert all(a >= b for a, b in itertools.pairwise(factors))
    assert factors[99] > floor  # the last update still moves the weights


def test_a_warm_up_longer_than_the_run_is_cut_to_the_run() -> None:
    assert [lr_factor(step, 200, 4, None, "linear", 0.0) for step in range(4)] == [
        0.25,
        0.5,
        0.75,
        1.0,
    ]


def test_without_decay_the_full_rate_stays() -> None:
    assert [lr_factor(step, 0, 5, 0.0, "linear", 0.0) for step in (0, 4, 5, 50)] == [1.0] * 4


def test_an_unknown_decay_type_is_refused() -> None:
    with pytest.raises(ValueError, match="'exp': use linear, sqrt or cosine"):
        lr_factor(5, 0, 10, None, "exp", 0.0)


def test_the_scheduler_gives_peak_times_factor_to_every_group() -> None:
    config = LRScheduler(warmup_steps=3, decay_type="cosine", min_lr_factor=0.1)
    expected = [PEAK * lr_factor(step, 3, 20, None, "cosine", 0.1) for step in range(20)]
    assert run(config, 20) == expected


def test_rates_after_a_resume_at_step_7_of_20_equal_the_unbroken_run_bit_for_bit() -> None:
    config = LRScheduler(warmup_steps=9, decay_type="cosine", min_lr_factor=0.1)
    assert run(config, 20, first=7) == run(config, 20)[7:]


def test_more_training_steps_mean_the_longer_runs_schedule_from_the_resumed_step_on() -> None:
    config = LRScheduler(warmup_steps=10, decay_type="cosine")
    resumed = run(config, 150, first=100)
    assert resumed == run(config, 150)[100:]
    assert resumed[0] > run(config, 100)[-1]


def test_total_steps_keeps_the_schedule_when_training_steps_change() -> None:
    config = LRScheduler(warmup_steps=2, total_steps=30)
    assert run(config, 20) == run(config, 30)[:20]
