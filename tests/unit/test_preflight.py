"""Bad input is found before any worker starts: every mistake, each once, with its numbers."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from tests.helpers import run_distributed
from torchtitan_lc import preflight
from torchtitan_lc.components.checkpoint_folders import choose_start
from torchtitan_lc.config import names
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.models.llama3 import FLAVORS
from torchtitan_lc.preflight import check_job
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.trainer import Trainer


def config_with(settings: dict[str, Any]) -> JobConfig:
    """The debug model on two ranks that share rows of 64 tokens, with ``settings`` by dotted key."""
    small = {
        "training.seq_len": 64,
        "training.steps": 2,
        "training.mixed_precision_param": "float32",
        "parallelism.context_parallel_degree": 2,
        "lr_scheduler.warmup_steps": 1,
    }
    config = JobConfig()
    for key, value in {**small, **settings}.items():
        names.set_key(config, key, value)
    return config


def problems(settings: dict[str, Any], world_size: int = 2, device_type: str = "cpu") -> list[str]:
    """The lines of the error; [] if the job passes."""
    try:
        check_job(config_with(settings), world_size, device_type)
    except UserError as error:
        return str(error).splitlines()
    return []


def test_a_job_without_mistakes_passes() -> None:
    assert problems({}) == []


CP = "parallelism.context_parallel_degree"
ULYSSES = "parallelism.context_parallel_ulysses_degree"
MISTAKES: dict[str, tuple[dict[str, Any], int, list[str]]] = {
    "no tokens": ({"training.seq_len": 0}, 2, ["training.seq_len = 0: must be at least 1"]),
    "degrees that do not divide": ({CP: 4}, 6, ["context_parallel_degree = 4", "6 ranks"]),
    "degrees with another product": (
        {"parallelism.data_parallel_shard_degree": 2},
        2,
        ["data_parallel_shard_degree = 2", "product is 4", "2 ranks"],
    ),
    "degree of zero": ({CP: 0}, 2, [f"{CP} = 0: must be at least 1"]),
    "more ranks than heads": (
        {CP: 16, ULYSSES: 16},
        16,
        ["16 ranks", "8 query heads", "at most 8"],
    ),
    "ulysses degree that does not divide": ({ULYSSES: 3}, 2, [f"{ULYSSES} = 3", "one of 1, 2"]),
    "ulysses degree below zero": ({ULYSSES: -2}, 2, [f"{ULYSSES} = -2"]),
    "local over two ranks": ({"attention.strategy": "local"}, 2, ["'local'", "2 ranks", "upipe"]),
    "no heads in a stage": ({"attention.heads_per_stage": 0}, 2, ["heads_per_stage = 0"]),
    "unknown model": ({"model.name": "lama3"}, 2, ["'lama3'", "llama3"]),
    "unknown flavor": ({"model.flavor": "8b"}, 2, ["'8b'", "did you mean '8B'"]),
    "missing module": (
        {"experimental.custom_import": "no_such_package.models"},
        2,
        ["experimental.custom_import", "no_such_package", "PYTHONPATH"],
    ),
    "senseless rope scaling": (
        {"model.rope.type": "llama3", "model.rope.factor": 0.5},
        2,
        ["[model.rope]", "factor=0.5", "factor >= 1"],
    ),
    "kernel of another device": ({"attention.kernel": "cudnn"}, 2, ["'cudnn'", "cpu"]),
    "unknown backend": (
        {"compile.enable": True, "compile.backend": "foo"},
        2,
        ["compile.backend = 'foo'", "inductor"],
    ),
    "dataset without a path": ({"training.dataset": "text"}, 2, ["training.dataset_path"]),
    "missing dataset": (
        {"training.dataset": "jsonl", "training.dataset_path": "no/such.jsonl"},
        2,
        ["training.dataset_path no/such.jsonl does not exist"],
    ),
    "tokenizer without a folder": ({"model.tokenizer": "hf"}, 2, ["model.hf_assets_path"]),
    "missing tokenizer": (
        {"model.hf_assets_path": "no/such/folder"},
        2,
        ["model.hf_assets_path is no/such/folder, which does not exist"],
    ),
    "missing first checkpoint": (
        {"checkpoint.enable": True, "checkpoint.initial_load_path": "no/step-1"},
        2,
        ["checkpoint.initial_load_path = 'no/step-1'", "no such folder"],
    ),
}


@pytest.mark.parametrize(("settings", "ranks", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_with_its_numbers(
    settings: dict[str, Any], ranks: int, words: list[str]
) -> None:
    (line,) = problems(settings, ranks)
    for word in words:
        assert word in line, (word, line)


@pytest.mark.parametrize("name", ["cudnn", "sdpa"])
def test_a_kernel_that_cannot_do_the_dtype_is_refused(name: str) -> None:
    (line,) = problems({"attention.kernel": name}, device_type="cuda")
    assert f"'{name}'" in line and "torch.float32" in line and "math" in line
    bf16 = {"attention.kernel": name, "training.mixed_precision_param": "bfloat16"}
    assert problems(bf16, device_type="cuda") == []


@pytest.mark.parametrize(("dataset", "suffix"), [("text", "txt"), ("jsonl", "jsonl")])
def test_an_empty_dataset_is_refused(dataset: str, suffix: str, tmp_path: Path) -> None:
    settings = {"training.dataset": dataset, "training.dataset_path": str(tmp_path)}
    for _ in range(2):  # an empty folder, then a folder with an empty file
        (line,) = problems(settings)
        assert f"training.dataset_path {tmp_path} is empty" in line
        (tmp_path / f"a.{suffix}").touch()


def test_a_tokenizer_larger_than_the_models_table_is_refused(tmp_path: Path) -> None:
    words = {f"w{i}": i for i in range(300)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    (line,) = problems({"model.hf_assets_path": str(tmp_path)})
    assert "300 tokens" in line and f"table of {FLAVORS['debugmodel'].vocab_size}" in line
    assert "model.hf_assets_path" in line


def test_several_mistakes_are_reported_together_each_once(tmp_path: Path) -> None:
    lines = problems(
        {
            "training.seq_len": 0,
            "training.steps": 0,
            "training.dataset": "text",
            "training.dataset_path": str(tmp_path / "missing"),
            "model.tokenizer": "tiktoken",
            "attention.kernel": "sdpa",
            "optimizer.lr": -1.0,
            "checkpoint.enable": True,
            "checkpoint.exclude_from_loading": ["moments"],
            CP: 16,
            ULYSSES: 16,
        },
        world_size=24,
    )
    told = (
        "context_parallel_degree = 16: 1 x 16 = 16 does not divide the 24 ranks",
        "training.steps = 0",
        "optimizer.lr = -1.0",
        "tiktoken",
        "training.seq_len = 0",
        "'sdpa'",
        "16 ranks exchange heads",
        "dataset_path",
        "moments",
    )
    for word in told:
        assert sum(word in line for line in lines) == 1, (word, lines)
    assert len(lines) == len(told), lines


def test_what_does_not_depend_on_the_model_is_told_beside_an_unknown_model() -> None:
    lines = problems({"model.name": "nobodys", "training.dataset": "text"})
    assert len(lines) == 2 and "dataset_path" in "".join(lines) and "nobodys" in "".join(lines)


@pytest.mark.parametrize("seq_len", [63, 1])
def test_a_row_of_any_length_passes_as_it_is_padded_to_the_layouts_multiple(seq_len: int) -> None:
    assert problems({"training.seq_len": seq_len}) == []


def test_a_dump_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    (text,) = problems({"job.dump_folder": str(file / "deep" / "folder")})
    assert text.startswith("job.dump_folder = ") and f"{file} is a file" in text
    assert problems({"job.dump_folder": str(tmp_path / "new" / "folder")}) == []
    assert not (tmp_path / "new").exists()


SAVES = {"checkpoint.enable": True}
FOLDERS = {
    "checkpoint": (SAVES, "checkpoint.folder = 'checkpoint'"),
    "elsewhere/ckpt": (SAVES | {"checkpoint.folder": "elsewhere/ckpt"}, "checkpoint.folder = "),
    "hf": (SAVES | {"checkpoint.hf_interval": 5}, "job.dump_folder = "),
    "logs": ({}, "job.dump_folder = "),
    "tb": ({"metrics.enable_tensorboard": True}, "metrics.save_tb_folder = 'tb'"),
}


@pytest.mark.parametrize(("name", "settings", "said"), [(k, *v) for k, v in FOLDERS.items()])
def test_a_folder_that_cannot_be_written_to_is_found_before_the_run_needs_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    settings: dict[str, Any],
    said: str,
) -> None:
    shut = tmp_path / name
    shut.mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != shut)
    (line,) = problems({"job.dump_folder": str(tmp_path), **settings})
    assert line.startswith(said) and f"{shut} cannot be written to" in line
    assert problems({"job.dump_folder": str(tmp_path)}) == ([line] if name == "logs" else [])


def test_one_thing_in_the_way_of_several_folders_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    inside = str(tmp_path / "file" / "job")
    (line,) = problems({"job.dump_folder": inside, **SAVES, "checkpoint.hf_interval": 5})
    assert line.startswith("job.dump_folder = ")
    (line,) = problems({"job.dump_folder": str(tmp_path), **SAVES, "checkpoint.folder": inside})
    assert line.startswith(f"checkpoint.folder = '{inside}': {tmp_path / 'file'} is a file")
    absolute = {"checkpoint.folder": str(tmp_path / "file")}
    (line,) = problems({"job.dump_folder": str(tmp_path), **SAVES, **absolute})
    assert "is a file" in line


@pytest.mark.parametrize(
    ("reader", "key"),
    [
        ("check_dataset", "training.dataset_path"),
        ("build_tokenizer", "model.hf_assets_path"),
        ("choose_start", "checkpoint.folder or checkpoint.initial_load_path"),
    ],
)
def test_a_path_that_cannot_be_read_is_a_line_with_its_key(
    monkeypatch: pytest.MonkeyPatch, reader: str, key: str
) -> None:
    def refuse(*asked: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/data/shut")

    monkeypatch.setattr(preflight, reader, refuse)
    (line,) = problems({})
    assert line.startswith(f"{key}: /data/shut: Permission denied; check the path")


def test_packages_that_metrics_need_are_looked_for_before_workers_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)
    assert problems({}) == []
    found = problems({"metrics.enable_wandb": True, "metrics.enable_tensorboard": True})
    assert len(found) == 2
    assert any("pip install tensorboard" in text for text in found)
    assert any("pip install -e '.[wandb]'" in text for text in found)


def test_a_key_without_effect_is_said_once_and_not_by_a_quiet_check(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = config_with({"compile.backend": "eager", "lr_scheduler.warmup_steps": 5})
    check_job(config, 2, "cpu", quiet=True)
    assert caplog.text == ""
    check_job(config, 2, "cpu")
    assert caplog.text.count("compile.backend = eager has no effect") == 1
    assert caplog.text.count("warmup_steps = 5 is longer than the schedule of 2 steps") == 1


# -- checkpoints


def _train(rank: int, world_size: int, settings: dict[str, Any]) -> list[str]:
    """Train to the end; what the log said."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger = logging.getLogger("torchtitan_lc")
    logger.addHandler(Keep())
    logger.setLevel(logging.INFO)
    trainer = Trainer(config_with(settings), torch.device("cpu"))
    trainer.train()
    trainer.close()
    return said


def _job(folder: Path) -> dict[str, Any]:
    return {
        "job.dump_folder": str(folder),
        "checkpoint.enable": True,
        "checkpoint.interval": 1,
        CP: 1,
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump folder of a job that saved step-1 and step-2; tests work on copies."""
    folder = tmp_path_factory.mktemp("finished")
    run_distributed(_train, 1, _job(folder))
    return folder


@pytest.fixture
def dump(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "job"))


def _files(folder: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in folder.rglob("*")}


def test_a_checkpoint_of_this_model_passes(dump: Path) -> None:
    assert problems(_job(dump), 1) == []


def test_a_checkpoint_of_another_model_is_refused_and_left_alone(dump: Path) -> None:
    before = _files(dump)
    settings = {**_job(dump), "model.flavor": "8B"}
    text = "\n".join(problems(settings, 1))
    assert text.count("does not fit") == 1 and str(dump / "checkpoint" / "step-2") in text
    assert "debugmodel" in text and "8B" in text, "both models are named"
    theirs, ours = FLAVORS["debugmodel"].dim, FLAVORS["8B"].dim
    shapes = f"shape {[theirs] * 2} in the checkpoint, {[ours] * 2} in this run"
    assert f"layers.0.attention.wq.weight: {shapes}" in text
    assert _files(dump) == before
    without = {**settings, "checkpoint.exclude_from_loading": ["model"]}
    assert problems(without, 1) == [], "who does not load the model may have another"


def test_a_corrupt_checkpoint_is_passed_over_for_an_older_complete_one_and_said(
    dump: Path,
) -> None:
    step_2 = dump / "checkpoint" / "step-2"
    next(step_2.glob("*.distcp")).write_bytes(b"cut short")
    settings = _job(dump)
    assert problems(settings, 1) == []
    start = choose_start(config_with(settings).checkpoint, dump)
    assert start.path == dump / "checkpoint" / "step-1"

    (said,) = run_distributed(_train, 1, settings)
    (line,) = [line for line in said if "is skipped" in line]
    assert str(step_2) in line and "continuing from step-1" in line
    assert "Training starts at step 2 of 2" in said


def test_corrupt_checkpoints_alone_are_no_reason_to_start_from_nothing(dump: Path) -> None:
    for file in dump.rglob("*.distcp"):
        file.unlink()
    before = _files(dump)
    (line,) = problems(_job(dump), 1)
    assert "no complete checkpoint is left" in line and "step-2" in line and "step-1" in line
    assert _files(dump) == before
