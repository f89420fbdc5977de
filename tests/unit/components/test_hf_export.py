"""An exported folder: complete or not there, with all that transformers and people look for in it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.hf_folders import differing, make_folder, read_weights
from torchtitan_lc.components import hf_export
from torchtitan_lc.components.hf_export import (
    Exporter,
    hugging_face_form,
    plan_files,
    write_folder,
)
from torchtitan_lc.components.hf_folder import HuggingFaceForm, has_weights
from torchtitan_lc.config import names
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.models.llama3 import FLAVORS
from torchtitan_lc.models.spec import HuggingFace, get_args, get_model
from torchtitan_lc.tools.errors import UserError

SHAPES: dict[str, tuple[int, ...]] = {"a": (3, 5), "b": (7,), "c": (2, 4)}


def form(**changes: Any) -> HuggingFaceForm:
    settings: dict[str, Any] = {
        "name": str.upper,
        "config": {"model_type": "x"},
        "dtype": torch.float32,
    }
    return HuggingFaceForm(**(settings | changes))


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


# ---- what is in it ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_read_back_with_the_format_tag(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    written = tensors(dtype)
    write_folder(tmp_path / "out", SHAPES, written.values(), form(dtype=dtype))
    assert differing(read_weights(tmp_path / "out"), written) == []
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_large_models_are_split_with_an_index_that_names_every_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_export, "_MAX_FILE_BYTES", 80)
    written = tensors()
    write_folder(tmp_path / "out", SHAPES, written.values(), form())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index["weight_map"] == {"a": first, "b": second, "c": second}
    assert index["metadata"]["total_size"] == 4 * (15 + 7 + 8)
    assert differing(read_weights(tmp_path / "out"), written) == []


def test_a_tensor_above_the_limit_has_a_file_of_its_own() -> None:
    files = plan_files({"a": (4,), "b": (100,), "c": (4,), "d": (4,)}, 2, max_bytes=20)
    assert list(files.values()) == [["a"], ["b"], ["c", "d"]]


def test_config_tokenizer_and_generation_settings_go_along_and_weights_of_the_source_do_not(
    tmp_path: Path,
) -> None:
    source = tmp_path / "source"
    make_folder(source, "llama", files=2)
    for name in ("tokenizer.json", "tokenizer.model", "special_tokens_map.json", "README.md"):
        (source / name).write_text(name)
    write_folder(tmp_path / "out", SHAPES, tensors().values(), form(assets=source))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "x"}


# ---- config.json -----------------------------------------------------------------------------


def exported_config(assets: Path | None, **settings: Any) -> dict[str, Any]:
    config = JobConfig()
    config.model.flavor = "from_hf" if assets else "debugmodel"
    config.model.hf_assets_path = str(assets or "")
    for key, value in settings.items():
        names.set_key(config, key.replace("__", "."), value)
    spec = get_model("llama3")
    assert spec.hf is not None
    return hugging_face_form(spec.hf, get_args(spec, config), config).config


def test_config_json_keeps_what_the_source_says_and_takes_over_what_the_run_changed(
    tmp_path: Path,
) -> None:
    make_folder(tmp_path / "hf", "llama")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": 7}))
    settings = {"model__rope__theta": 5e6, "training__seq_len": 256}
    config = exported_config(tmp_path / "hf", **settings)
    assert config["rope_theta"] == 5e6
    assert config["max_position_embeddings"] == 256
    assert config["torch_dtype"] == "float32"  # as the tensors: checkpoint.export_dtype
    assert (config["pad_token_id"], config["eos_token_id"]) == (7, 257)
    assert exported_config(tmp_path / "hf", training__seq_len=32)["max_position_embeddings"] == 64
    bf16 = exported_config(tmp_path / "hf", checkpoint__export_dtype="bfloat16")
    assert bf16["torch_dtype"] == "bfloat16"


def test_the_other_spelling_of_rope_in_the_source_does_not_contradict_the_runs(
    tmp_path: Path,
) -> None:
    make_folder(tmp_path / "hf", "llama")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "dtype": "bfloat16"}
    del config["rope_theta"], config["torch_dtype"]
    path.write_text(json.dumps(config))
    exported = exported_config(tmp_path / "hf", model__rope__theta=5e6)
    assert exported["rope_theta"] == 5e6 and "rope_parameters" not in exported
    assert exported["dtype"] == "float32" and "torch_dtype" not in exported


def test_the_length_that_rope_scaling_is_computed_from_is_not_raised(tmp_path: Path) -> None:
    make_folder(tmp_path / "hf", "llama")
    path = tmp_path / "hf" / "config.json"
    dynamic = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    path.write_text(json.dumps(json.loads(path.read_text()) | dynamic))
    exported = exported_config(tmp_path / "hf", training__seq_len=128)
    assert exported["rope_scaling"] == dynamic["rope_scaling"]
    assert exported["max_position_embeddings"] == 64


def test_a_config_json_of_another_model_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8, "x": 1}')
    config = JobConfig()
    config.model.hf_assets_path = str(tmp_path)
    spec = get_model("llama3")
    assert isinstance(spec.hf, HuggingFace)
    made = hugging_face_form(spec.hf, FLAVORS["debugmodel"], config).config
    assert made["hidden_size"] == 192 and "x" not in made
    assert made["architectures"] == ["LlamaForCausalLM"]


# ---- complete or not there -------------------------------------------------------------------


class Killed(BaseException):
    """As when the process dies: no handler of the writer's runs."""


def _interrupted(after: int) -> Iterator[Tensor]:
    for i, tensor in enumerate(tensors().values()):
        if i == after:
            raise Killed
        yield tensor


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_interrupted_export_leaves_no_complete_looking_folder(
    tmp_path: Path, after: int
) -> None:
    with pytest.raises(Killed):
        write_folder(tmp_path / "step-5", SHAPES, _interrupted(after), form())
    assert [p.name for p in tmp_path.iterdir()] == ["step-5.unfinished"]
    write_folder(tmp_path / "step-5", SHAPES, tensors().values(), form())
    assert [p.name for p in tmp_path.iterdir()] == ["step-5"]


def test_an_export_that_fails_leaves_the_one_before_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tensors()
    write_folder(tmp_path / "step-5", SHAPES, before.values(), form())
    with monkeypatch.context() as patch:

        def full(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(hf_export.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_folder(tmp_path / "step-5", SHAPES, tensors().values(), form())
    assert differing(read_weights(tmp_path / "step-5"), before) == []
    after = tensors()
    write_folder(tmp_path / "step-5", SHAPES, after.values(), form())
    assert differing(read_weights(tmp_path / "step-5"), after) == []
    assert [p.name for p in tmp_path.iterdir()] == ["step-5"]


# ---- in the background -----------------------------------------------------------------------


class Held:
    """Holds every export before its first file until ``go`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        write_file = hf_export._write_file

        def held(*args: Any) -> None:
            assert self.go.wait(timeout=30)
            write_file(*args)

        monkeypatch.setattr(hf_export, "_write_file", held)


def test_an_export_holds_what_was_true_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    weights = tensors()
    exporter = Exporter(tmp_path, form(), weights, None)
    at_the_call = {name.upper(): tensor.clone() for name, tensor in weights.items()}
    exporter.start(5, weights)  # returns although nothing is written
    for tensor in weights.values():
        tensor.fill_(0)
    assert not has_weights(tmp_path / "step-5")
    held.go.set()
    exporter.wait()
    assert differing(read_weights(tmp_path / "step-5"), at_the_call) == []
    exporter.close()


def test_a_failed_export_is_told_once_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = Exporter(tmp_path, form(), tensors(), None)
    with monkeypatch.context() as patch:

        def full(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(hf_export.os, "fsync", full)
        exporter.start(1, tensors())
        with pytest.raises(UserError, match=r"step-1 could not be written: .*No space left"):
            exporter.wait()
    exporter.start(2, tensors())
    exporter.wait()
    exporter.close()
    assert has_weights(tmp_path / "step-2") and not (tmp_path / "step-1").exists()


def test_after_a_failure_of_the_run_the_export_in_flight_ends_and_its_own_failure_is_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = Exporter(tmp_path, form(), tensors(), None)
    exporter.start(1, tensors())
    exporter.close()
    assert has_weights(tmp_path / "step-1")
    failing = Exporter(tmp_path, form(), tensors(), None)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_export.os, "fsync", full)
    failing.start(2, tensors())
    failing.close()
    assert "step-2 could not be written: [Errno 28] No space left" in caplog.text
