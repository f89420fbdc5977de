"""TorchTitan's and the fork's old names are understood, or refused with the way to say it here."""

import pytest

from torchtitan_lc.config import names
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.manager import load_config
from torchtitan_lc.config.renamed import GONE, GONE_SECTIONS, MOVED
from torchtitan_lc.config.values import toml_item
from torchtitan_lc.tools.errors import UserError

SAMPLE = {"bool": True, "int": 3, "float": 0.5, "str": "x"}


@pytest.mark.parametrize("old", MOVED)
def test_a_moved_name_sets_the_new_key_from_both_sources(load, old):
    new = MOVED[old]
    value = SAMPLE[names.all_keys()[new].base]
    section, _, name = old.rpartition(".")
    assert names.get_key(load(f"[{section}]\n{name} = {toml_item(value)}"), new) == value
    assert names.get_key(load_config([f"--{old}={value}"]), new) == value


def test_a_moved_boolean_keeps_its_flag_forms(load):
    assert load_config(["--training.compile"]).compile.enable is True
    assert load("[compile]\nenable = true", "--training.no_compile").compile.enable is False
    assert load_config(["--checkpoint.enable_checkpoint"]).checkpoint.enable is True


def test_a_value_of_the_wrong_type_under_an_old_name_is_refused(mistake):
    assert "[training] batch_size = true: expected an integer" in mistake(
        "[training]\nbatch_size = true"
    )


def test_old_and_new_name_together_are_refused_in_a_file(mistake):
    text = mistake("[training]\nbatch_size = 2\nlocal_batch_size = 4")
    assert "given twice, under its old and its new name" in text


def test_no_old_name_hides_a_key_of_ours():
    assert not set(names.all_keys()) & (set(MOVED) | set(GONE))
    assert not set(names.all_sections()) & set(GONE_SECTIONS)
    assert set(MOVED.values()) <= set(names.all_keys())


def test_advice_names_only_keys_that_exist():
    import re

    sections = "|".join(section.replace(".", r"\.") for section in names.all_sections())
    for gone in [*GONE.values(), *GONE_SECTIONS.values()]:
        for key in re.findall(rf"\b(?:{sections})\.\w+", gone.advice):
            assert key in names.all_keys(), gone.advice


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ('model.attn_impl = "upipe_fa3_offload"', "attention.strategy"),
        ("parallelism.tensor_parallel_degree = 2", "parallelism.data_parallel_shard_degree"),
        ("parallelism.pipeline_parallel_degree = 2", "pipeline parallelism is not offered"),
        ("training.chunked_loss = true", "tiling.loss_tokens"),
        ('training.pretrained_checkpoint_path = "x"', "checkpoint.initial_load_path"),
        ('model.converters = ["float8"]', "float8.enable = true"),
        ("float8.enable_fsdp_float8_all_gather = true", "training.mixed_precision_param"),
        ("mx = {enable = true}", "mx training is not offered"),
        ('experimental.custom_args_module = "x"', "experimental.custom_import"),
        ('activation_checkpoint.selective_ac_option = "2"', "mode selective keeps"),
        ("optimizer.fused = true", "optimizer.implementation"),
        ("validation = {enable = true}", "evaluation during training is not offered"),
        ("fault_tolerance = {enable = true}", "TorchFT is not offered"),
        ("memory_estimation = {enabled = true}", "not offered"),
    ],
)
def test_a_name_without_counterpart_is_refused_with_what_to_say_instead(mistake, line, answer):
    text = mistake(line)
    assert answer in text
    assert "is not a setting here" in text


@pytest.mark.parametrize(
    "line",
    [
        "parallelism.tensor_parallel_degree = 1",
        "parallelism.enable_async_tensor_parallel = false",
        'parallelism.pipeline_parallel_schedule = "1F1B"',
        "model.converters = []",
        'compile.components = ["model", "loss"]',
        "activation_checkpoint.offloading = false",
        'comm.mode = "default"',
        "validation = {enable = false, freq = 5}",
        'quantize = {linear = {float8 = {filter_fqns = ["output"]}}}',
        "float8.precompute_float8_dynamic_scale_for_fsdp = false",
        "float8.moe_fqns_prototype = []",
    ],
)
def test_a_foreign_key_that_asks_for_nothing_is_accepted(load, line):
    config = load(line)
    config.job.config_file = None
    assert config == JobConfig()


def test_refusals_reach_the_command_line_too():
    with pytest.raises(UserError, match="tensor parallelism is not offered"):
        load_config(["--parallelism.tensor_parallel_degree", "2"])
    load_config(["--parallelism.tensor_parallel_degree", "1"])
    with pytest.raises(UserError, match="float8.recipe_name"):
        load_config(["--quantize.linear.float8.recipe_name", "rowwise"])
