"""A key that is set and does nothing is named; a config in which all keys act gives no warning."""

import pytest

from torchtitan_lc.config import names
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.no_effect import TABLE
from torchtitan_lc.config.validate import warn


def warnings(**settings):
    config = JobConfig()
    for key, value in settings.items():
        names.set_key(config, key.replace("__", "."), value)
    return warn(config)


def test_the_defaults_give_no_warning():
    assert warn(JobConfig()) == []


CASES = [
    ("attention__heads_per_stage", 4, {}),
    ("attention__heads_per_stage", 4, {"attention__strategy": "ulysses"}),
    ("activation_checkpoint__selective_layers", 4, {"activation_checkpoint__mode": "full"}),
    ("activation_checkpoint__selective_layers", 4, {"activation_checkpoint__mode": "none"}),
    ("activation_checkpoint__block_inputs_every", 2, {"activation_checkpoint__mode": "none"}),
    ("activation_offload__host_memory_gib", 8.0, {}),
    ("activation_offload__early_fetch", False, {}),
    ("debug__share_offload_buffers", True, {}),
    ("profiling__profiler_warmup", 4, {}),
    ("profiling__save_traces_folder", "x", {"profiling__enable_memory_snapshot": True}),
    ("profiling__profile_freq", 50, {}),
    ("profiling__save_memory_snapshot_folder", "x", {"profiling__enable_profiling": True}),
    ("metrics__save_tb_folder", "x", {"metrics__enable_wandb": True}),
    ("metrics__save_for_all_ranks", True, {}),
    ("model__hf_assets_path", "x", {"model__tokenizer": "byte"}),
    ("model__rope__factor", 8.0, {"model__rope__type": "default"}),
    ("optimizer__beta2", 0.9, {"optimizer__name": "SGD"}),
    ("optimizer__offload_state", True, {"optimizer__name": "SGD"}),
    ("optimizer__offload_state", True, {"training__enable_cpu_offload": True}),
    ("lr_scheduler__decay_type", "cosine", {"lr_scheduler__decay_ratio": 0.0}),
    ("training__dataset_path", "x", {}),
    ("compile__backend", "eager", {}),
    ("float8__recipe_name", "rowwise", {}),
    ("float8__emulate", True, {}),
    ("checkpoint__interval", 5, {}),
    ("checkpoint__exclude_from_loading", ["optimizer"], {}),
    ("checkpoint__keep_latest_k", 3, {"checkpoint__enable": True, "checkpoint__load_only": True}),
    ("checkpoint__export_dtype", "bfloat16", {"checkpoint__enable": True}),
    ("checkpoint__initial_load_model_only", False, {"checkpoint__enable": True}),
]


@pytest.mark.parametrize(("key", "value", "others"), CASES)
def test_a_key_without_effect_is_named_with_the_reason(key, value, others):
    (text,) = warnings(**{key: value}, **others)
    assert text.startswith(f"{key.replace('__', '.')} = {value} has no effect: ")
    assert warnings(**others) == []


@pytest.mark.parametrize(
    ("key", "value", "others"),
    [
        ("attention__heads_per_stage", 4, {"attention__strategy": "upipe"}),
        ("attention__heads_per_stage", 4, {"parallelism__context_parallel_degree": 2}),
        ("activation_checkpoint__selective_layers", 0, {}),
        ("activation_checkpoint__block_inputs_every", 2, {"activation_checkpoint__mode": "full"}),
        ("activation_checkpoint__block_inputs_every", 2, {}),
        ("activation_offload__enable", True, {}),
        ("activation_offload__host_memory_gib", 8.0, {"activation_offload__enable": True}),
        ("activation_offload__early_fetch", True, {"activation_offload__enable": True}),
        ("debug__share_offload_buffers", True, {"activation_offload__enable": True}),
        ("profiling__profile_freq", 50, {"profiling__enable_memory_snapshot": True}),
        ("optimizer__offload_state", True, {}),
        ("training__enable_cpu_offload", True, {"optimizer__name": "SGD"}),
        ("metrics__save_tb_folder", "x", {"metrics__enable_tensorboard": True}),
        ("metrics__save_for_all_ranks", True, {"metrics__enable_wandb": True}),
        ("model__rope__factor", 8.0, {"model__rope__type": "llama3"}),
        ("model__rope__factor", 8.0, {}),
        ("training__mixed_precision_param", "float32", {}),
        # bf16 weights, fp32 activations: another computation
        ("training__mixed_precision_param", "float32", {"training__dtype": "bfloat16"}),
        ("compile__backend", "eager", {"compile__enable": True}),
        ("checkpoint__keep_latest_k", 3, {"checkpoint__enable": True}),
        (
            "checkpoint__export_dtype",
            "bfloat16",
            {"checkpoint__enable": True, "checkpoint__last_save_model_only": True},
        ),
    ],
)
def test_a_key_with_an_effect_is_not_named(key, value, others):
    assert warnings(**{key: value}, **others) == []


def test_a_key_is_named_once_though_two_reasons_hold():
    (text,) = warnings(
        checkpoint__enable=True, checkpoint__load_only=True, checkpoint__export_dtype="bfloat16"
    )
    assert text.count("has no effect") == 1
    assert "saves nothing; " in text


def test_every_key_in_the_table_exists():
    for row in TABLE:
        for key in row.keys:
            known = names.all_sections() if key.endswith(".*") else names.all_keys()
            assert key.removesuffix(".*") in known


def test_a_warm_up_longer_than_the_run_is_said():
    (text,) = warnings(training__steps=100)
    assert "warmup_steps = 200" in text
    assert "100 steps" in text
    assert warnings(training__steps=200) == []


def test_a_decay_that_reaches_into_the_warm_up_is_said():
    (text,) = warnings(training__steps=300, lr_scheduler__decay_ratio=0.5)
    assert "decay is cut to the last 100" in text
    assert warnings(training__steps=400, lr_scheduler__decay_ratio=0.5) == []


def test_a_schedule_that_ends_before_the_run_is_said():
    (text,) = warnings(training__steps=2000, lr_scheduler__total_steps=1000)
    assert "total_steps = 1000 ends before training.steps = 2000" in text
