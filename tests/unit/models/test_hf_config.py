"""config.json: both spellings are read, what is not supported is refused by name, and what is written
loads in transformers with the same numbers and without a warning."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.spec import FROM_HF, get_args, get_model
from torchtitan_lc.ops.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    Rope,
    Scaling,
    YarnScaling,
)
from torchtitan_lc.preflight import check_job
from torchtitan_lc.tools.errors import UserError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 5e5,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}


def read(content: dict[str, Any], name: str = "llama3") -> DecoderArgs:
    hf = get_model(name).hf
    assert hf is not None
    return hf.read_config(content)


def of(model_type: str, **changes: Any) -> dict[str, Any]:
    architecture = f"{model_type.capitalize()}ForCausalLM"
    return {**LLAMA, "model_type": model_type, "architectures": [architecture], **changes}


def test_the_shape_is_what_the_folder_says(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    config = JobConfig()
    config.model.flavor, config.model.hf_assets_path = FROM_HF, str(tmp_path)
    config.training.seq_len = 100
    args = get_args(get_model("llama3"), config)
    assert args == DecoderArgs(
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=80,
        vocab_size=97,
        head_dim=16,
        norm_eps=1e-5,
        rope_theta=5e5,
        max_position_embeddings=256,
    )


def test_a_folder_without_a_config_is_refused_with_the_key(tmp_path: Path) -> None:
    config = JobConfig()
    config.model.flavor = FROM_HF
    for folder in ("", str(tmp_path)):
        config.model.hf_assets_path = folder
        with pytest.raises(UserError, match=r"model\.hf_assets_path"):
            get_args(get_model("llama3"), config)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        get_args(get_model("llama3"), config)


def test_preflight_reads_the_folder_and_says_what_its_rope_is_made_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 300}))
    config = JobConfig()
    config.model.flavor, config.model.hf_assets_path = FROM_HF, str(tmp_path)
    config.model.tokenizer = "byte"
    config.training.seq_len = 256
    config.training.mixed_precision_param = "float32"
    config.job.dump_folder = str(tmp_path)
    check_job(config, 1, "cpu")
    assert caplog.text == ""
    config.training.seq_len = 1024
    check_job(config, 1, "cpu")
    assert caplog.text.count("training.seq_len = 1024 is longer than this model's rope") == 1
    config.model.name = "qwen3"
    with pytest.raises(UserError) as raised:
        check_job(config, 1, "cpu")
    (line,) = str(raised.value).splitlines()
    assert "model_type = 'llama'" in line and "set model.name = 'llama3'" in line


YARN = {"factor": 40.0, "original_max_position_embeddings": 4096}
V4_AND_V5 = {
    "none": (None, None),
    "linear": ({"factor": 4.0}, LinearScaling(4.0, 256)),
    "dynamic": ({"factor": 4.0}, DynamicScaling(4.0, 256)),
    "yarn": (YARN, YarnScaling(40.0, 4096)),
    "yarn of this length": ({"factor": 4.0}, YarnScaling(4.0, 256)),
    "llama3": (
        {
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        Llama3Scaling(32.0),
    ),
}


@pytest.mark.parametrize("case", V4_AND_V5)
def test_rope_settings_mean_the_same_in_every_spelling(case: str) -> None:
    settings, want = V4_AND_V5[case]
    plain = {k: v for k, v in LLAMA.items() if not k.startswith("rope")}
    kind = "default" if settings is None else case.split()[0]
    parameters = {"rope_theta": 1e6, "rope_type": kind, **(settings or {})}
    spellings = [{**plain, "rope_parameters": parameters}]
    if settings is None:
        spellings += [{**plain, "rope_theta": 1e6}]
    for key in ("type", "rope_type"):
        if settings is not None:
            spellings += [{**plain, "rope_theta": 1e6, "rope_scaling": {key: kind, **settings}}]
    both = {"type": kind, **parameters}
    spellings += [{**plain, "rope_parameters": both}]
    for content in spellings:
        args = read(content)
        assert (args.rope_theta, args.rope_scaling) == (1e6, want), content


def test_the_length_is_the_one_after_scaling() -> None:
    for kind, settings, length in (
        ("linear", {}, 1024),
        ("dynamic", {}, 1024),
        ("yarn", {}, 1024),
        ("yarn", {"original_max_position_embeddings": 64}, 256),
        ("yarn", {"original_max_position_embeddings": 32}, 256),
    ):
        scaling = {"rope_type": kind, "factor": 4.0, **settings}
        assert read({**LLAMA, "rope_scaling": scaling}).max_position_embeddings == length, scaling


# What is changed in Llama's config.json -> words of the message.
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "other activation": ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'"]),
    "attention bias": ({"attention_bias": True}, ["attention_bias = True"]),
    "mlp bias": ({"mlp_bias": True}, ["mlp_bias = True"]),
    "dropout": ({"attention_dropout": 0.1}, ["attention_dropout = 0.1"]),
    "quantised": ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
    "partial rotary": ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
    "experts": ({"num_local_experts": 8}, ["num_local_experts = 8"]),
    "two at once": ({"mlp_bias": True, "hidden_act": "gelu"}, ["mlp_bias", "hidden_act"]),
    "another model": ({"model_type": "qwen2"}, ["model_type = 'qwen2'", "model.name = 'qwen2'"]),
    "an unknown model": ({"model_type": "mixtral"}, ["'mixtral'", "llama, qwen2"]),
    "another head": (
        {"architectures": ["LlamaForSequenceClassification"]},
        ["LlamaForSequenceClassification", "only LlamaForCausalLM"],
    ),
    "unknown rope": (
        {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
        ["rope_type = 'longrope'", "yarn"],
    ),
    "two types": (
        {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 4.0}},
        ["type and rope_type"],
    ),
    "two thetas": (
        {"rope_scaling": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        ["two values of rope_theta", "10000.0 and 500000.0"],
    ),
    "two scalings": (
        {
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "rope_parameters": {"rope_type": "linear", "factor": 8.0},
        },
        ["rope_scaling", "rope_parameters", "keep one"],
    ),
    "unknown key": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fats": 2}},
        ["beta_fats"],
    ),
    "theta in words": ({"rope_theta": "big"}, ["rope_theta = 'big'"]),
    "factor in words": ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, ["'factor': '4'"]),
    "no factor": ({"rope_scaling": {"rope_type": "linear"}}, ["lacks factor"]),
    "factor below one": ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, ["factor=0.5"]),
    "rope per kind of layer": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        ["per kind of layer"],
    ),
    "layers with windows": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        ["sliding_attention", "only full_attention"],
    ),
    "no width": ({"hidden_size": None}, ["hidden_size = None"]),
    "heads that do not group": ({"num_key_value_heads": 3}, ["n_heads = 4", "n_kv_heads = 3"]),
    "odd head": ({"head_dim": 15}, ["head_dim = 15"]),
}


@pytest.mark.parametrize(("changes", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_refused_by_its_name(
    changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UserError) as raised:
        read({**LLAMA, **changes})
    for word in words:
        assert word in str(raised.value)


def test_a_window_shorter_than_the_row_is_refused_and_a_longer_one_changes_nothing() -> None:
    mistral = of("mistral", sliding_window=128)
    spec, config = get_model("mistral"), JobConfig()
    config.training.seq_len = 128
    args = spec.adjust(read(mistral, "mistral"), config)
    assert args.sliding_window == 128
    config.training.seq_len = 129
    with pytest.raises(UserError, match="seq_len = 129.*window of 128"):
        spec.adjust(read(mistral, "mistral"), config)
    no_word = {k: v for k, v in mistral.items() if k != "sliding_window"}
    assert read(no_word, "mistral").sliding_window == 4096, "transformers' default"
    assert read({**mistral, "sliding_window": None}, "mistral").sliding_window is None


def test_qwens_windows_are_refused_only_where_some_layer_has_one() -> None:
    off = of("qwen2", sliding_window=32, use_sliding_window=False, max_window_layers=1)
    assert read(off, "qwen2").sliding_window is None
    on = {**off, "use_sliding_window": True}
    with pytest.raises(UserError, match="sliding_window = 32 from layer 1 on"):
        read(on, "qwen2")
    assert read({**on, "max_window_layers": 2}, "qwen2").sliding_window is None


# -- written, and read by transformers

SCALINGS: list[Scaling | None] = [
    None,
    LinearScaling(4.0, 256),
    NtkScaling(4.0, 256),
    DynamicScaling(4.0, 256, seq_len=1024),
    YarnScaling(4.0, 256),
    YarnScaling(4.0, 256, beta_fast=16.0, truncate=False, attention_factor=1.5),
    Llama3Scaling(4.0, original_max_position_embeddings=256),
]


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_what_is_written_gives_transformers_the_same_frequencies_without_a_warning(
    name: str, scaling: Scaling | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf = get_model(name).hf
    assert hf is not None
    args = DecoderArgs(
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=80,
        vocab_size=97,
        rope_theta=1e6,
        rope_scaling=scaling,
        max_position_embeddings=1024,
        qkv_bias=name == "qwen2",
        qk_norm=name == "qwen3",
    )
    content = hf.write_config(args)
    (tmp_path / "config.json").write_text(json.dumps(content))
    logging.getLogger("transformers").propagate = True
    try:
        with caplog.at_level(logging.WARNING):
            theirs = transformers.AutoConfig.from_pretrained(tmp_path)
            transformers.AutoModelForCausalLM.from_config(theirs)
    finally:
        logging.getLogger("transformers").propagate = False
    # Packages that transformers imports where they are installed (torchao) may have their own to say.
    said = [r.getMessage() for r in caplog.records if r.name.startswith("transformers")]
    assert said == []
    kind = theirs.rope_parameters["rope_type"]
    seq_len = 1024 if kind == "dynamic" else None
    if kind == "default":
        exponents = torch.arange(0, args.head_dim, 2) / args.head_dim
        want, factor = theirs.rope_parameters["rope_theta"] ** -exponents, 1.0
    else:
        want, factor = ROPE_INIT_FUNCTIONS[kind](theirs, seq_len=seq_len)
    rope = Rope(args.head_dim, args.rope_theta, scaling)
    torch.testing.assert_close(rope.inv_freq().float(), want.float(), rtol=1e-6, atol=0)
    assert rope.attention_scaling == pytest.approx(factor)

    again = hf.read_config(content)
    if not isinstance(scaling, NtkScaling | DynamicScaling):
        assert again == args
    elif isinstance(scaling, DynamicScaling):  # whose row is that of the job
        assert again == dataclasses.replace(args, rope_scaling=DynamicScaling(4.0, 256))
