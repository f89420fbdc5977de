"""Rotary embedding: Hugging Face's pairing and scaling, exact at any position."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from torchtitan_lc.ops.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    Rope,
    Scaling,
    YarnScaling,
)


def _llama3_by_the_paper(dim: int, theta: float, s: Llama3Scaling) -> list[float]:
    """One frequency at a time, in plain Python."""
    result = []
    for i in range(0, dim, 2):
        freq = theta ** (-i / dim)
        wavelength = 2 * math.pi / freq
        if wavelength < s.original_max_position_embeddings / s.high_freq_factor:
            result.append(freq)
        elif wavelength > s.original_max_position_embeddings / s.low_freq_factor:
            result.append(freq / s.factor)
        else:
            ratio = s.original_max_position_embeddings / wavelength
            smooth = (ratio - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
            result.append((1 - smooth) * freq / s.factor + smooth * freq)
    return result


def test_llama3_scaling_is_that_of_the_published_config() -> None:
    scaling = Llama3Scaling(factor=8.0)
    got = Rope(128, 500_000.0, scaling).inv_freq()
    want = torch.tensor(_llama3_by_the_paper(128, 500_000.0, scaling), dtype=torch.float64)
    assert got.shape == (64,) and torch.allclose(got, want, rtol=1e-7, atol=0)
    plain = Rope(128, 500_000.0).inv_freq()
    assert got[0] == plain[0] == 1.0, "the high-frequency part is unchanged"
    torch.testing.assert_close(got[-1], plain[-1] / 8)  # the lowest part is divided by the factor


# inv_freq of transformers 5.24 for Llama 3.1's config.json, in fp32: one value of the part that stays,
# the interpolated ones between their neighbours, and the last.
HUGGING_FACE = {
    0: 1.0,
    1: 0.8146172165870667,
    27: 0.003942275885492563,
    28: 0.0032114461064338684,
    29: 0.0021665706299245358,
    30: 0.0013718936825171113,
    31: 0.0008567514596506953,
    32: 0.0005248460220173001,
    33: 0.0003126936499029398,
    34: 0.0001785077911335975,
    35: 9.556212171446532e-05,
    36: 7.784655463183299e-05,
    63: 3.068925877869333e-07,
}


def test_llama3_scaling_has_hugging_faces_numbers() -> None:
    got = Rope(128, 500_000.0, Llama3Scaling(factor=8.0)).inv_freq()
    for i, want in HUGGING_FACE.items():
        assert got[i].item() == pytest.approx(want, rel=5e-7), i  # they compute in fp32
    plain = Rope(128, 500_000.0).inv_freq()
    assert torch.equal(got[:29], plain[:29]) and torch.equal(got[35:], plain[35:] / 8)


# Settings of config.json -> ours. The attention factors are those that DeepSeek, Qwen and others write.
YARN = {"factor": 40.0, "original_max_position_embeddings": 4096}
FROM_CONFIGS: list[tuple[dict[str, Any], Scaling]] = [
    ({"rope_type": "linear", "factor": 8.0}, LinearScaling(8.0, 8192)),
    ({"rope_type": "dynamic", "factor": 2.0}, DynamicScaling(2.0, 8192, seq_len=100_000)),
    ({"rope_type": "dynamic", "factor": 2.0}, DynamicScaling(2.0, 8192, seq_len=1000)),
    ({"rope_type": "yarn", **YARN}, YarnScaling(40.0, 4096)),
    ({"rope_type": "yarn", **YARN, "mscale": 1.0}, YarnScaling(40.0, 4096, mscale=1.0)),
    (
        {"rope_type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
    ),
    (
        {"rope_type": "yarn", **YARN, "mscale": 0.707, "mscale_all_dim": 1.4},
        YarnScaling(40.0, 4096, mscale=0.707, mscale_all_dim=1.4),
    ),
    (
        {"rope_type": "yarn", **YARN, "attention_factor": 1.0},
        YarnScaling(40.0, 4096, attention_factor=1.0),
    ),
    (
        {"rope_type": "yarn", **YARN, "attention_factor": 1.5, "mscale": 2.0},
        YarnScaling(40.0, 4096, attention_factor=1.5, mscale=2.0),
    ),
    (
        {"rope_type": "yarn", **YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        YarnScaling(40.0, 4096, beta_fast=16.0, beta_slow=2.0, truncate=False),
    ),
    (
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        Llama3Scaling(factor=32.0),
    ),
]


@pytest.mark.parametrize(("settings", "scaling"), FROM_CONFIGS, ids=str)
@pytest.mark.parametrize(("head_dim", "theta"), [(128, 1e6), (64, 5e5), (64, 1e4)])
def test_frequencies_and_attention_factor_are_those_of_transformers(
    settings: dict[str, Any], scaling: Any, head_dim: int, theta: float
) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=8192,
        rope_parameters={"rope_theta": theta, **settings},
    )
    function = ROPE_INIT_FUNCTIONS[settings["rope_type"]]
    want, factor = function(config, seq_len=getattr(scaling, "seq_len", None))
    rope = Rope(head_dim, theta, scaling)
    got = rope.inv_freq()
    # They compute in fp32, where a power alone is off by some 1e-6.
    torch.testing.assert_close(got, want.double(), rtol=3e-6, atol=0)
    assert rope.attention_scaling == pytest.approx(factor, rel=1e-12)


def test_ntk_scaling_is_a_larger_theta_that_slows_the_slowest_pair_by_the_factor() -> None:
    scaling = NtkScaling(4.0, 8192)
    got, plain = Rope(128, 1e4, scaling).inv_freq(), Rope(128, 1e4).inv_freq()
    assert got[0] == plain[0]
    torch.testing.assert_close(got[-1], plain[-1] / 4)
    theta = 1e4 * 4.0 ** (128 / 126)
    assert torch.equal(got, Rope(128, theta).inv_freq())
    dynamic = DynamicScaling(4.0, 8192, seq_len=8192)
    assert torch.equal(Rope(128, 1e4, dynamic).inv_freq(), plain), "within its context unchanged"


def test_yarn_multiplies_rotated_heads_by_its_factor_at_10_million_positions() -> None:
    scaling = YarnScaling(4.0, 32_768)
    rope = Rope(64, 1e6, scaling)
    factor = 0.1 * math.log(4.0) + 1.0
    ones = torch.cat((torch.ones(32), torch.zeros(32))).view(1, 1, 1, 64)
    position = 10_000_019
    got = rope.rotate(ones, rope.cos_sin(torch.tensor([[position]])))[0, 0, 0]
    for i in range(32):
        angle = math.fmod(position * rope.inv_freq()[i].item(), 2 * math.pi)
        assert abs(got[i].item() - factor * math.cos(angle)) < 2e-6, i
        assert abs(got[32 + i].item() - factor * math.sin(angle)) < 2e-6, i


def test_dimension_i_is_paired_with_i_plus_half_as_in_hugging_face() -> None:
    x = torch.zeros(1, 1, 1, 8)
    x[..., 1] = 1.0
    rotated = Rope(8, 10_000.0).rotate(x, Rope(8, 10_000.0).cos_sin(torch.tensor([[3]])))[0, 0, 0]
    angle = 3 * 10_000.0 ** (-2 / 8)
    want = torch.zeros(8)
    want[1], want[5] = math.cos(angle), math.sin(angle)
    torch.testing.assert_close(rotated, want)


@pytest.mark.parametrize("position", [0, 63, 131_071, 10_000_019, 2**31 + 7])
def test_angles_are_exact_at_any_position(position: int) -> None:
    rope = Rope(64, 500_000.0)
    ones = torch.cat((torch.ones(32), torch.zeros(32))).view(1, 1, 1, 64)
    got = rope.rotate(ones, rope.cos_sin(torch.tensor([[position]])))[0, 0, 0]
    for i in range(32):
        # Python's fmod on exact products of integers and doubles: no fp32 anywhere.
        angle = math.fmod(position * rope.inv_freq()[i].item(), 2 * math.pi)
        assert abs(got[i].item() - math.cos(angle)) < 2e-6, (position, i)
        assert abs(got[32 + i].item() - math.sin(angle)) < 2e-6, (position, i)


def test_a_bf16_model_rotates_with_full_precision_angles() -> None:
    rope = Rope(64, 500_000.0)
    torch.manual_seed(0)
    x = torch.randn(1, 4, 2, 64)
    positions = torch.tensor([[131_068, 131_069, 131_070, 131_071]])
    want = rope.rotate(x.double(), rope.cos_sin(positions))
    got = rope.rotate(x.bfloat16(), rope.cos_sin(positions))
    assert got.dtype == torch.bfloat16
    # Rounding of input and output to bf16 only; bf16 angles would be off by up to 1.9 radians.
    assert (got - want).abs().max() <= 2**-7 * x.abs().max()
    assert rope.inv_freq().dtype == torch.float64


def test_there_is_no_table_that_a_longer_row_could_outgrow() -> None:
    rope = Rope(16, 10_000.0, Llama3Scaling(original_max_position_embeddings=32))
    x = torch.randn(1, 64, 1, 16)
    whole = rope.rotate(x, rope.cos_sin(torch.arange(64).view(1, -1)))
    second = rope.rotate(x[:, 32:], rope.cos_sin(torch.arange(32, 64).view(1, -1)))
    assert torch.equal(whole[:, 32:], second)


def test_senseless_scaling_is_refused_with_its_numbers() -> None:
    for low, high in ((4.0, 1.0), (4.0, 4.0), (0.0, 4.0), (math.nan, 4.0)):
        with pytest.raises(ValueError, match=rf"low_freq_factor={low}, high_freq_factor={high}"):
            Llama3Scaling(low_freq_factor=low, high_freq_factor=high)
    for factor in (0.5, math.nan):
        with pytest.raises(ValueError, match=f"got factor={factor}"):
            Llama3Scaling(factor=factor)
        for kind in (LinearScaling, NtkScaling, DynamicScaling, YarnScaling):
            with pytest.raises(ValueError, match=f"got factor={factor}"):
                kind(factor, 8192)
    with pytest.raises(ValueError, match="beta_fast=1.0, beta_slow=32.0"):
        YarnScaling(4.0, 8192, beta_fast=1.0, beta_slow=32.0)
    with pytest.raises(ValueError, match="attention_factor=-1.0"):
        YarnScaling(4.0, 8192, attention_factor=-1.0)
