"""[float8] where it cannot run is refused before any worker starts, with what to change."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.tiny import FLAVORS
from tests.unit.test_preflight import problems
from torchtitan_lc.models import spec as specs
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.models.decoder.parallelize import parallelize

MODEL = {"model.flavor": "1B"}  # the debug model has heads of 24
ON = {**MODEL, "float8.enable": True, "training.mixed_precision_param": "bfloat16"}
EMULATED = {**MODEL, "float8.enable": True, "float8.emulate": True}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: "torchao" if name == "torchao" else found(name)
    )


def test_float8_passes_in_bf16_on_a_gpu_and_emulated_anywhere() -> None:
    assert problems(ON, device_type="cuda") == []
    assert problems(EMULATED) == []
    assert problems({**EMULATED, "training.mixed_precision_param": "bfloat16"}) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (ON, ["float8.enable = true on cpu", "float8.emulate"]),
        ({**EMULATED, "float8.filter_fqns": ["attention.qkv"]}, ["filter_fqns", "'attention.qkv'"]),
        ({**EMULATED, "model.flavor": "debugmodel"}, ["head_dim = 24", "multiple of 16"]),
    ],
)
def test_what_float8_cannot_do_is_one_line_with_the_fix(
    settings: dict[str, Any], words: list[str]
) -> None:
    (line,) = problems(settings)
    assert all(word in line for word in words), line


def test_without_torchao_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torchao" else found(name)
    )
    (line,) = problems(ON, device_type="cuda")
    assert "pip install -e '.[float8]'" in line
    assert problems({"float8.enable": False}) == []


def test_a_model_is_asked_for_its_sides_and_one_that_does_not_know_float8_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def sides(args: Any, config: Any) -> list[str]:
        asked.append(args.n_heads)
        return ["a side that is odd"]

    known = specs.ModelSpec("known", FLAVORS, Decoder, parallelize, float8=sides)
    other = specs.ModelSpec("other", FLAVORS, Decoder, parallelize)
    monkeypatch.setattr(specs, "_registry", {"known": known, "other": other})
    model = {**EMULATED, "model.flavor": "gqa"}
    assert problems({**model, "model.name": "known"}) == ["a side that is odd"] and asked == [8]
    (line,) = problems({**model, "model.name": "other"})
    assert "'other'" in line and "`float8`" in line
    assert problems({**model, "model.name": "other", "float8.enable": False}) == []
