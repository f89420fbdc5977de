"""[model.rope] and training.seq_len applied to a flavor, and what the log says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.manager import load_config
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.settings import adjust, warnings
from torchtitan_lc.models.llama3 import FLAVORS
from torchtitan_lc.models.spec import FROM_HF, flavor_args, get_model
from torchtitan_lc.ops.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    YarnScaling,
)
from torchtitan_lc.tools.errors import UserError

SMOL = FLAVORS["SmolLM2-135M"]  # 8192 tokens, no scaling, heads of 64


def job(seq_len: int = 8192, **rope: Any) -> JobConfig:
    config = JobConfig()
    config.training.seq_len = seq_len
    for name, value in rope.items():
        assert hasattr(config.model.rope, name)
        setattr(config.model.rope, name, value)
    return config


@pytest.mark.parametrize(
    ("rope", "want"),
    [
        ({"type": "linear", "factor": 4.0}, LinearScaling(4.0, 8192)),
        ({"type": "ntk", "factor": 4.0}, NtkScaling(4.0, 8192)),
        ({"type": "dynamic", "factor": 4.0}, DynamicScaling(4.0, 8192, seq_len=30_000)),
        ({"type": "yarn", "factor": 4.0}, YarnScaling(4.0, 8192)),
        (
            {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "truncate": False,
                "attention_factor": 1.25,
                "mscale": 0.5,
                "mscale_all_dim": 0.25,
            },
            YarnScaling(4.0, 4096, 16.0, 2.0, False, 1.25, 0.5, 0.25),
        ),
        (
            {"type": "llama3", "low_freq_factor": 2.0, "high_freq_factor": 8.0},
            Llama3Scaling(8.0, 2.0, 8.0, 8192),
        ),
        ({"type": "default"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_each_type_of_scaling_can_be_set_with_all_its_keys(rope: dict[str, Any], want: Any) -> None:
    assert adjust(SMOL, job(30_000, **rope)).rope_scaling == want


def test_another_type_starts_from_the_context_that_the_old_one_started_from() -> None:
    args = adjust(FLAVORS["8B"], job(type="yarn", factor=16.0))
    assert args.rope_scaling == YarnScaling(16.0, 8192)
    assert args.max_position_embeddings == 131_072


@pytest.mark.parametrize(
    ("args", "rope", "words"),
    [
        (SMOL, {"type": "yarn"}, ["'yarn' needs model.rope.factor"]),
        (
            FLAVORS["debugmodel"],
            {"type": "yarn"},
            ["model.rope.factor and model.rope.original_max_position_embeddings"],
        ),
        (SMOL, {"factor": 4.0}, ["model.rope.factor set", "model.rope.type"]),
        (FLAVORS["8B"], {"beta_fast": 4.0}, ["model.rope.beta_fast", "'llama3' does not have"]),
        (SMOL, {"type": "linear", "factor": 0.5}, ["[model.rope]", "factor=0.5"]),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused_with_the_keys(
    args: DecoderArgs, rope: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UserError) as raised:
        adjust(args, job(**rope))
    for word in words:
        assert word in str(raised.value)


# Rope settings of SmolLM2 and the longest row for which they are made.
@pytest.mark.parametrize(
    ("rope", "reach"),
    [
        ({}, 8192),
        ({"type": "linear", "factor": 4.0}, 32_768),
        ({"type": "ntk", "factor": 4.0}, 32_768),
        ({"type": "dynamic", "factor": 4.0}, 32_768),
        ({"type": "yarn", "factor": 4.0}, 32_768),
        ({"type": "llama3", "factor": 4.0}, 32_768),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16_384),
        ({"theta": 1e5}, 8192),
        ({"theta": 1e4}, 8192),
        ({"theta": 1e5 * 4.0 ** (64 / 62) * 1.0001}, 32_768),  # as NTK-aware scaling by 4
    ],
    ids=str,
)
def test_a_row_longer_than_the_rope_is_made_for_is_said_with_the_numbers(
    rope: dict[str, Any], reach: int
) -> None:
    assert warnings(SMOL, job(reach, **rope)) == []
    (text,) = warnings(SMOL, job(2 * reach, **rope))
    assert f"training.seq_len = {2 * reach}" in text and "set model.rope.theta to" in text
    assert f"about {reach} tokens" in text or "theta" in rope
    # Whoever follows the advice is not warned again.
    theta = float(text.split("theta to ")[1].split()[0])
    if "type" not in rope:
        assert warnings(SMOL, job(2 * reach, theta=theta)) == [], text
    # The weights are then made for the row that they were trained on.
    assert adjust(SMOL, job(2 * reach, **rope)).max_position_embeddings == 2 * reach
    shown = 8192 if "theta" in rope else reach  # how far a theta reaches nobody has shown
    assert adjust(SMOL, job(1, **rope)).max_position_embeddings == shown


def test_a_flavors_own_scaling_reaches_what_is_published_and_further_with_a_larger_factor() -> None:
    args = FLAVORS["8B"]
    assert warnings(args, job(131_072)) == []
    assert len(warnings(args, job(262_144))) == 1
    assert warnings(args, job(262_144, factor=16.0)) == []
    assert len(warnings(args, job(16_384, type="default"))) == 1


def test_a_model_that_says_no_length_is_not_warned_about() -> None:
    assert warnings(FLAVORS["debugmodel"], job(10_000_000)) == []


def test_the_documented_examples_reach_their_rows_without_a_warning(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    examples = [part.split("```")[0] for part in text.split("```toml\n")[1:]]
    checked = []
    for number, example in enumerate(examples):
        path = tmp_path / f"{number}.toml"
        path.write_text(example)
        config = load_config(["--job.config_file", str(path)])
        spec = get_model(config.model.name)
        if config.model.flavor == FROM_HF:
            continue
        args = flavor_args(spec, config)
        assert spec.warnings(args, config) == []
        alone = job(config.training.seq_len)
        assert len(spec.warnings(args, alone)) == 1, "the setting is needed"
        checked.append(spec.adjust(args, config))
    theta, yarn = checked
    assert theta.rope_theta == 420_000.0 and theta.max_position_embeddings == 32_768
    assert yarn.rope_scaling == YarnScaling(4.0, 131_072)
    assert yarn.max_position_embeddings == 524_288
