"""A job that starts from Hugging Face weights or exports them: what is found before it starts."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf_folders import make_folder, read_weights, write_weights
from torchtitan_lc.components.checkpoint_folders import choose_start
from torchtitan_lc.config import names
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.models import spec as registry
from torchtitan_lc.preflight import check_job
from torchtitan_lc.tools.errors import UserError


def config_with(settings: dict[str, Any]) -> JobConfig:
    small = {
        "training.seq_len": 64,
        "training.steps": 2,
        "training.mixed_precision_param": "float32",
        "lr_scheduler.warmup_steps": 1,
        "model.flavor": "from_hf",
        "model.tokenizer": "byte",
        "activation_checkpoint.mode": "none",
    }
    config = JobConfig()
    for key, value in {**small, **settings}.items():
        names.set_key(config, key, value)
    return config


def problems(settings: dict[str, Any]) -> list[str]:
    """The lines of the error; [] if the job passes."""
    try:
        check_job(config_with(settings), 1, "cpu")
    except UserError as error:
        return str(error).splitlines()
    return []


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    make_folder(tmp_path / "hf", "llama")
    return {
        "job.dump_folder": str(tmp_path / "out"),
        "model.hf_assets_path": str(tmp_path / "hf"),
        "checkpoint.enable": True,
        "checkpoint.initial_load_in_hf": True,
    }


def test_a_folder_of_this_model_passes(job: dict[str, Any]) -> None:
    assert problems(job) == []


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_weights_that_came_with_a_tokenizer_are_not_trained_on_bytes(
    job: dict[str, Any], tmp_path: Path, name: str
) -> None:
    (tmp_path / "hf" / name).write_text("{}")
    (line,) = problems(job | {"model.tokenizer": "byte"})
    assert f"({name})" in line and 'model.tokenizer = "auto"' in line
    del job["checkpoint.initial_load_in_hf"]
    assert problems(job | {"model.tokenizer": "byte"}) == [], (
        "weights of one's own may be new to it"
    )


def test_weights_of_another_model_stop_the_job_with_the_whole_list(
    job: dict[str, Any], tmp_path: Path
) -> None:
    tensors = read_weights(tmp_path / "hf")
    biases = {name.replace("weight", "bias"): torch.zeros(3) for name in tensors if "_proj" in name}
    write_weights(tmp_path / "hf", tensors | biases)
    said = problems(job)
    assert len(biases) == 14
    for name in biases:
        assert f"  {name}: only in the checkpoint" in said
    assert problems(job | {"checkpoint.exclude_from_loading": ["model"]}) == []


def test_initial_load_path_goes_before_hf_assets_path(job: dict[str, Any], tmp_path: Path) -> None:
    elsewhere = {"checkpoint.initial_load_path": str(tmp_path / "elsewhere")}
    (line,) = problems(job | elsewhere)
    assert "elsewhere: there is no such folder of Hugging Face weights" in line
    make_folder(tmp_path / "elsewhere", "llama")
    assert problems(job | elsewhere) == []
    start = choose_start(config_with(job | elsewhere).checkpoint, tmp_path, str(tmp_path / "hf"))
    assert start.path == tmp_path / "elsewhere" and start.in_hf and start.model_only


def test_no_folder_at_all_is_told(job: dict[str, Any]) -> None:
    (line,) = problems(job | {"model.hf_assets_path": "", "model.flavor": "debugmodel"})
    assert "checkpoint.initial_load_in_hf = true, but no folder is named" in line


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"checkpoint.initial_load_model_only": False}, "holds weights only"),
        ({"checkpoint.enable": False}, "loads only with checkpoint.enable = true"),
        ({"checkpoint.hf_interval": -1}, "checkpoint.hf_interval = -1: must be at least 0"),
    ],
)
def test_settings_that_contradict_each_other_are_told(
    job: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    (line,) = problems(job | settings)
    assert said in line


@pytest.mark.parametrize(
    ("key", "value"), [("initial_load_in_hf", True), ("last_save_in_hf", True), ("hf_interval", 5)]
)
def test_a_model_without_a_hugging_face_form_can_neither_load_nor_export_one(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, key: str, value: Any
) -> None:
    llama = registry.get_model("llama3")
    bare = dataclasses.replace(llama, name="bare", hf=None)
    monkeypatch.setitem(registry._registry, "bare", bare)
    plain = {**job, "model.name": "bare", "model.flavor": "debugmodel"}
    del plain["checkpoint.initial_load_in_hf"]
    assert problems(plain) == []
    (line,) = problems(plain | {f"checkpoint.{key}": value})
    assert f"checkpoint.{key} = {value}: the model 'bare' does not say" in line


def test_a_hugging_face_folder_named_as_a_step_folder_is_recognised(
    job: dict[str, Any], tmp_path: Path
) -> None:
    del job["checkpoint.initial_load_in_hf"]
    (line,) = problems(job | {"checkpoint.initial_load_path": str(tmp_path / "hf")})
    assert "it is a Hugging Face folder" in line and "initial_load_in_hf = true" in line


@pytest.mark.parametrize("enable", [True, False])
def test_weights_beside_the_tokenizer_that_are_not_loaded_are_told(
    tmp_path: Path, enable: bool
) -> None:
    make_folder(tmp_path / "hf", "llama")
    config = config_with({"checkpoint.enable": enable}).checkpoint
    (note,) = choose_start(config, tmp_path / "out", str(tmp_path / "hf")).notes
    assert "holds weights, but training starts from random ones" in note
    (tmp_path / "hf" / "model.safetensors").unlink()
    assert choose_start(config, tmp_path / "out", str(tmp_path / "hf")).notes == ()


def test_export_settings_count_as_a_use_of_dtype_and_assets(
    job: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    used = {"checkpoint.hf_interval": 1, "checkpoint.export_dtype": "bfloat16"}
    check_job(config_with(job | used), 1, "cpu")
    assert "no effect" not in caplog.text
    unused = {"checkpoint.load_only": True, "checkpoint.last_save_in_hf": True} | used
    check_job(config_with(job | unused), 1, "cpu")
    for key in ("last_save_in_hf", "hf_interval", "export_dtype"):
        assert f"checkpoint.{key} = " in caplog.text
