"""`--dry_run` through the launcher: what it measures, how it ends, what it leaves on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchtitan_lc.dry_run import job as dry_job
from torchtitan_lc.dry_run.compare import NAME
from torchtitan_lc.dry_run.rank import Rank
from torchtitan_lc.launch import main

DEBUG = (
    *("--config", "debug.toml", "--training.seq_len", "512"),
    *("--plan.hardware", "h100_80gb", "--plan.gpus_per_node", "8"),
)


def launch(folder: Path, *flags: str) -> int:
    arguments = [*DEBUG, "--dry_run", "--job.dump_folder", str(folder), *flags]
    return main(["--nproc_per_node", "1", "--", *arguments])


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / NAME).read_text())
    return found


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job counts as large."""
    monkeypatch.setattr(dry_job, "_MOST_FLOPS", 0)


OFFLOAD = (
    "--parallelism.context_parallel_degree=8",
    "--activation_offload.enable",
    "--activation_offload.no_early_fetch",
)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        OFFLOAD,
        ("--activation_checkpoint.mode=full", "--training.global_batch_size=8"),
        ("--attention.strategy=ulysses", "--dry_run.kernel=stand_in", "--optimizer.name=SGD"),
    ],
    ids=["plain", "offload", "full, accumulation", "stand-in, SGD"],
)
def test_the_plan_is_within_3_per_cent_of_what_is_measured(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    assert launch(tmp_path, *flags) == 0
    found = record(tmp_path)
    assert found["tensors"] == "real" and found["fits"]
    figures = found["figures"]
    assert {"parameters", "gradients", "allocated between steps", "peak allocated"} <= set(figures)
    assert ("host: offloaded activations" in figures) == (flags == OFFLOAD)
    for name, figure in figures.items():
        least = -1 if name == "peak allocated" else -3
        assert least <= figure["plan_off_by_percent"] <= 3, f"{name}: {figure}"
    assert abs(figures["allocated between steps"]["plan_off_by_percent"]) < 0.5


def test_fake_tensors_take_what_real_ones_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (*OFFLOAD, "--dry_run.kernel", "stand_in")
    assert launch(tmp_path / "real", *flags) == 0
    monkeypatch.setattr(dry_job, "_MOST_FLOPS", 0)
    assert launch(tmp_path / "fake", *flags) == 0
    real, faked = record(tmp_path / "real"), record(tmp_path / "fake")
    assert (real["tensors"], faked["tensors"]) == ("real", "fake")
    for name, figure in real["figures"].items():
        close = pytest.approx(figure["measured"], rel=0.001)
        assert faked["figures"][name]["measured"] == close, name


def test_fake_tensors_need_neither_the_memory_nor_the_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that would take 100 GiB and hours here."""
    flags = ("--training.seq_len=4M", "--tiling.mlp_tokens=0", "--tiling.projection_tokens=0")
    large = ("--attention.kernel=fa4", "--training.mixed_precision_param=bfloat16")
    code = launch(tmp_path, *flags, *large, "--tiling.loss_tokens=256K")
    found = record(tmp_path)
    assert (code == 0) == found["fits"]
    assert found["tensors"] == "fake" and found["kernel"] == "stand-in"
    assert found["figures"]["peak allocated"]["measured"] > 4 * 2**30
    assert "Tensors are fake" in capsys.readouterr().out


def test_a_job_too_long_for_fake_tensors_is_refused_and_sent_to_the_plan(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fake: None,
) -> None:
    monkeypatch.setattr(dry_job, "_LONGEST", 0)
    assert launch(tmp_path) == 2
    assert "use --plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--dry_run.steps", "1"), "dry_run.steps = 1"),
        (("--dry_run.memory_limit_gib", "0"), "dry_run.memory_limit_gib = 0"),
        (("--dry_run.memory_limit_gib", "0.1"), "planned: CUDA context"),
        (("--attention.kernel", "fa4"), 'dry_run.kernel = "stand_in" needs none'),
        (("--optimizer.offload_state",), "optimizer.offload_state = true"),
        (("--plan.gpus_per_node", "7"), "context_parallel_degree = 2"),
        (("--training.dataset", "text", "--training.dataset_path", "/not/there"), "/not/there"),
    ],
)
def test_a_mistake_ends_with_2_and_says_which(
    flags: tuple[str, ...], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(tmp_path, *flags) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / NAME).exists()


def test_out_of_memory_ends_with_3_and_says_how_far_it_got(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(tmp_path) == 0
    fits = record(tmp_path)["figures"]["peak allocated"]["measured"]
    assert launch(tmp_path, "--plan.machine.memory_gib", str(1.5 + (0.9 * fits) / 2**30)) == 3
    found, said = record(tmp_path), capsys.readouterr().out
    assert found["ran_out_of_memory"] and not found["fits"]
    assert found["at"].startswith("step 2, backward of layer")
    assert f"out of memory in {found['at']}" in said and "MiB that are allocated exceed" in said
    assert found["figures"]["parameters"]["measured"] > 0
    assert "peak allocated" not in found["figures"]
    assert not dist.is_initialized()


def test_what_cuda_says_when_memory_runs_out_is_a_result_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_out(rank: Rank, metrics: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 ...")

    monkeypatch.setattr(Rank, "train_step", run_out)
    assert launch(tmp_path) == 3
    assert record(tmp_path)["error"] == "CUDA out of memory. Tried to allocate 2 GiB."
    assert "does not fit: out of memory in step 2, reading the rows" in capsys.readouterr().out


def test_other_errors_are_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rank: Rank, metrics: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Rank, "train_step", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        launch(tmp_path)
    assert not dist.is_initialized() and not (tmp_path / NAME).exists()


def test_a_host_that_is_too_small_ends_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(tmp_path, "--plan.machine.host_memory_gib", "10") == 3
    assert "too much per host" in capsys.readouterr().out
    assert not record(tmp_path)["ran_out_of_memory"]


def test_nothing_of_a_run_on_disk_is_changed(tmp_path: Path) -> None:
    """debug.toml saves checkpoints, metrics and TensorBoard events."""
    held = {
        "checkpoint/step-7/.metadata": b"not to be read",
        "metrics.jsonl": b'{"step": 7}\n',
        "config.toml": b"# of the run\n",
        "tb/events": b"events",
    }
    for name, text in held.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    assert launch(tmp_path, "--checkpoint.interval", "1", "--profiling.enable_profiling") == 0
    files = {str(p.relative_to(tmp_path)): p for p in tmp_path.rglob("*") if p.is_file()}
    assert set(files) == {*held, NAME}
    assert all(files[name].read_bytes() == text for name, text in held.items())


def test_the_report_says_what_is_not_real(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(tmp_path, *OFFLOAD, "--dry_run.kernel", "stand_in")
    said = capsys.readouterr().out
    for words in (
        "Peers are not there: this is rank 0 of 8",
        "Layers share their host buffers",
        "Attention is not computed",
        "nothing is loaded or saved",
        "It fits",
    ):
        assert words in said, words
