"""Combinations that cannot run are named before anything starts, all of them, with the fix."""

import math

import pytest

from torchtitan_lc.config import names
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.validate import (
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    accumulation_steps,
    check,
    resolve_degrees,
    resolve_strategy,
)


def config_with(**settings):
    """config_with(training__seq_len=63): `__` stands for the dot."""
    config = JobConfig()
    for key, value in settings.items():
        names.set_key(config, key.replace("__", "."), value)
    return config


def problems(world_size=1, **settings):
    return check(config_with(**settings), world_size)


def only(world_size=1, **settings):
    """The text of the one problem that there must be."""
    found = problems(world_size, **settings)
    assert len(found) == 1, found
    return found[0]


def degrees(replicate=1, shard=-1, cp=1):
    return {
        "parallelism__data_parallel_replicate_degree": replicate,
        "parallelism__data_parallel_shard_degree": shard,
        "parallelism__context_parallel_degree": cp,
    }


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_the_defaults_fit_any_number_of_ranks(world_size):
    assert check(JobConfig(), world_size) == []


@pytest.mark.parametrize(
    ("wanted", "world_size", "resolved"),
    [
        ((1, -1, 1), 8, (1, 8, 1)),
        ((2, -1, 2), 8, (2, 2, 2)),
        ((1, -1, 8), 8, (1, 1, 8)),
        ((2, 2, 2), 8, (2, 2, 2)),
        ((1, 1, 1), 1, (1, 1, 1)),
    ],
)
def test_minus_one_takes_the_ranks_that_are_left(wanted, world_size, resolved):
    assert resolve_degrees(config_with(**degrees(*wanted)), world_size) == resolved


@pytest.mark.parametrize(
    ("wanted", "world_size", "parts"),
    [
        ((1, -1, 3), 4, ["1 x 3 = 3", "4 ranks", "NGPU"]),
        ((1, -1, 8), 4, ["1 x 8 = 8 does not divide the 4 ranks", "start a multiple of 8 ranks"]),
        ((2, 2, 2), 4, ["product is 8", "4 ranks", "-1"]),
        ((1, 2, 1), 4, ["product is 2", "4 ranks"]),
        ((0, -1, 1), 4, ["data_parallel_replicate_degree = 0", "at least 1"]),
        ((1, 0, 1), 4, ["data_parallel_shard_degree = 0", "or -1"]),
        ((1, -2, 1), 4, ["data_parallel_shard_degree = -2"]),
        ((1, -1, 0), 4, ["context_parallel_degree = 0", "at least 1"]),
        ((-1, -1, -4), 4, ["data_parallel_replicate_degree = -1"]),
    ],
)
def test_degrees_that_do_not_make_up_the_ranks_are_refused(wanted, world_size, parts):
    with pytest.raises(ValueError) as caught:
        resolve_degrees(config_with(**degrees(*wanted)), world_size)
    assert only(world_size, training__seq_len=24, **degrees(*wanted)) == str(caught.value)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "asked", [{"plan__enable": True}, {"plan__ladder": "x.png"}, {"dry_run__enable": True}]
)
@pytest.mark.parametrize("wanted", [(1, -1, 8), (1, 2, 4)])
def test_where_no_ranks_are_started_the_plans_numbers_are_named_as_the_fix(asked, wanted):
    with pytest.raises(ValueError) as caught:
        resolve_degrees(config_with(**degrees(*wanted), **asked), 4)
    assert "(plan.nodes, plan.gpus_per_node)" in str(caught.value)
    assert "NGPU" not in str(caught.value)


@pytest.mark.parametrize(
    ("ulysses", "fits"),
    [(-1, True), (4, True), (2, True), (1, True), (3, False), (8, False), (0, False), (-2, False)],
)
def test_a_ulysses_degree_divides_the_ranks_of_a_row(ulysses, fits):
    settings = degrees(cp=4) | {"parallelism__context_parallel_ulysses_degree": ulysses}
    if fits:
        assert problems(4, **settings) == []
    else:
        text = only(4, **settings)
        assert f"context_parallel_ulysses_degree = {ulysses}" in text
        assert "use -1 or one of 1, 2, 4" in text


@pytest.mark.parametrize(
    ("emulate", "dtype", "fits"),
    [(False, "bfloat16", True), (False, "float32", False), (True, "float32", True)],
)
def test_float8_without_emulation_computes_in_bf16(emulate, dtype, fits):
    settings = {
        "float8__enable": True,
        "float8__emulate": emulate,
        "training__mixed_precision_param": dtype,
    }
    if fits:
        assert problems(**settings) == []
    else:
        text = only(**settings)
        assert "float8.enable = true" in text and "training.mixed_precision_param" in text


@pytest.mark.parametrize(
    ("strategy", "cp", "resolved"),
    [("auto", 1, "local"), ("auto", 2, "upipe"), ("ulysses", 2, "ulysses"), ("upipe", 1, "upipe")],
)
def test_auto_is_local_on_one_rank_and_upipe_on_several(strategy, cp, resolved):
    config = config_with(attention__strategy=strategy, **degrees(cp=cp))
    assert resolve_strategy(config) == resolved


@pytest.mark.parametrize(
    ("local", "wanted", "dp", "steps"), [(1, -1, 4, 1), (2, 8, 4, 1), (2, 16, 4, 2), (1, 6, 2, 3)]
)
def test_gradients_accumulate_over_whole_micro_batches(local, wanted, dp, steps):
    config = config_with(training__local_batch_size=local, training__global_batch_size=wanted)
    assert accumulation_steps(config, dp) == steps


@pytest.mark.parametrize(("wanted", "near"), [(9, 8), (4, 8), (0, 8), (-2, 8), (21, 24)])
def test_a_global_batch_that_does_not_divide_is_refused(wanted, near):
    text = only(4, training__local_batch_size=2, training__global_batch_size=wanted)
    assert f"training.global_batch_size = {wanted}" in text
    assert "local_batch_size 2 x data-parallel degree 4 = 8" in text
    assert f"use {near}" in text


def test_context_parallel_ranks_do_not_count_as_data_parallel():
    assert problems(4, training__global_batch_size=2, **degrees(cp=2)) == []
    assert "data-parallel degree 4" in only(4, training__global_batch_size=2)


@pytest.mark.parametrize("key", AT_LEAST_ONE)
def test_counts_are_at_least_one(key):
    for value in (0, -3):
        assert f"{key} = {value}: must be at least 1" in problems(**{key.replace(".", "__"): value})


@pytest.mark.parametrize("key", AT_LEAST_ZERO)
def test_sizes_are_at_least_zero(key):
    name = key.replace(".", "__")
    assert f"{key} = -1: must be at least 0" in problems(**{name: -1})
    assert problems(**{name: 0}) == []


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("optimizer.lr", [1e-9, 1.0], [0.0, -1.0, math.nan, math.inf]),
        ("optimizer.eps", [1e-20], [0.0, math.nan]),
        ("optimizer.weight_decay", [0.0], [-0.1, math.nan, math.inf]),
        ("optimizer.beta1", [0.0, 0.99], [1.0, -0.1, math.nan]),
        ("optimizer.beta2", [0.0, 0.99], [1.0, -0.1, math.nan]),
        ("training.max_norm", [0.1, math.inf], [0.0, -1.0, math.nan]),
        ("lr_scheduler.decay_ratio", [None, 0.0, 0.1, 1.0], [-0.1, 1.1, math.nan]),
        ("lr_scheduler.min_lr_factor", [0.0, 1.0], [-0.1, 1.1, math.nan]),
        ("lr_scheduler.total_steps", [None, 1], [0, -5]),
        ("model.rope.theta", [None, 1e6], [0.0, -1.0]),
        ("model.rope.original_max_position_embeddings", [None, 8192], [0]),
        ("checkpoint.keep_latest_k", [0, 2], [1]),
        ("debug.seed", [0, 2**63 - 1], [2**63]),
        ("job.dump_folder", ["x"], ["", "  "]),
        ("checkpoint.folder", ["x"], [""]),
    ],
)
def test_a_value_outside_its_range_is_named(key, good, bad):
    name = key.replace(".", "__")
    for value in good:
        assert problems(**{name: value}) == []
    for value in bad:
        assert key in only(**{name: value})


def test_a_trace_needs_room_in_its_period():
    settings = {"profiling__enable_profiling": True, "profiling__profile_freq": 3}
    assert "use 4 or more" in only(**settings)
    assert problems(**settings, profiling__profiler_warmup=2) == []
    assert problems(profiling__profile_freq=3) == []


@pytest.mark.parametrize(
    ("name", "value"), [("load_step", 5), ("initial_load_path", "x/step-5"), ("load_only", True)]
)
def test_loading_needs_checkpoints_enabled(name, value):
    settings = {f"checkpoint__{name}": value}
    assert f"checkpoint.{name} = {value}" in only(**settings)
    assert problems(checkpoint__enable=True, **settings) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("last_save_in_hf", True), ("hf_interval", 5), ("last_save_model_only", True)],
)
def test_what_asks_for_something_to_be_saved_needs_checkpoints_enabled(name, value):
    settings = {f"checkpoint__{name}": value}
    text = only(**settings)
    assert f"checkpoint.{name} = {value} with checkpoint.enable = false" in text
    assert f"set checkpoint.enable to true, or leave {name} out" in text
    assert problems(checkpoint__enable=True, **settings) == []


def test_a_config_that_saves_at_intervals_runs_without_checkpoints_too():
    assert problems(checkpoint__interval=5, checkpoint__keep_latest_k=2) == []


def test_offload_needs_checkpointed_blocks():
    settings = {"activation_offload__enable": True}
    for mode in ("selective", "full"):
        assert problems(activation_checkpoint__mode=mode, **settings) == []
    text = only(activation_checkpoint__mode="none", **settings)
    assert 'activation_checkpoint.mode = "none"' in text and '"selective" or "full"' in text


@pytest.mark.parametrize("gib", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("enable", [False, True])
def test_an_amount_of_host_memory_is_above_zero(gib, enable):
    settings = {"activation_offload__enable": enable}
    text = only(activation_offload__host_memory_gib=gib, **settings)
    assert f"activation_offload.host_memory_gib = {gib}" in text and '"auto"' in text
    for fits in (0.5, "auto"):
        assert problems(activation_offload__host_memory_gib=fits, **settings) == []


def test_a_step_below_zero_is_no_step():
    assert "checkpoint.load_step = -2" in only(checkpoint__enable=True, checkpoint__load_step=-2)


def test_all_failures_are_reported_together():
    found = problems(
        4,
        training__seq_len=0,
        training__steps=0,
        checkpoint__keep_latest_k=1,
        **degrees(replicate=3, cp=2),
    )
    assert len(found) == len(set(found)) == 4
