"""./run_train.sh as a user runs it, on a job of a few seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_lc.config import JobConfig
from torchtitan_lc.config.manager import load_config

ROOT = Path(__file__).parents[2]
QUICK = [
    "--training.seq_len=256",
    "--training.steps=4",
    "--training.global_batch_size=2",
    "--metrics.log_freq=2",
    "--checkpoint.interval=2",
    "--lr_scheduler.warmup_steps=2",
]


def run_train(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "run_train.sh"), *flags],
        env={**os.environ, "PYTHON": sys.executable, "NGPU": "2", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
    )


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished job of four steps."""
    folder = tmp_path_factory.mktemp("job")
    done = run_train(*QUICK, f"--job.dump_folder={folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "first_output").write_text(done.stdout + done.stderr)
    return folder


def test_the_log_names_mesh_parameters_strategy_kernel_and_versions(job: Path) -> None:
    text = (job / "first_output").read_text()
    for part in (
        "dp_replicate 1 x dp_shard 1 x cp 2",
        "parameters",
        "upipe: 8 query and 4 KV heads over 2 ranks, 4 stages of 1 head per rank",
        "kernel cpu (the fastest that is here",
        "torch 2.",
        "Training starts at step 1",
        "step:  1  loss:",
        "step:  4  loss:",
    ):
        assert part in text, part
    assert "\r" not in text, "no progress bar where no terminal is"


def test_every_file_of_the_job_is_there_once(job: Path) -> None:
    lines = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 4]
    assert set(lines[0]) == {
        *("step", "loss", "grad_norm", "lr", "tps", "tflops", "mfu", "mfu_causal"),
        *("memory_gib", "n_tokens_seen", "time_s"),
    }
    assert lines[-1]["n_tokens_seen"] == 4 * 2 * 256
    assert len(list(job.rglob("events.out.tfevents.*"))) == 1
    steps = sorted(p.name for p in (job / "checkpoint").iterdir())
    assert steps == ["step-2", "step-4"]


def test_the_resolved_config_beside_the_checkpoints_is_the_one_that_ran(job: Path) -> None:
    saved = load_config(["--job.config_file", str(job / "config.toml")])
    assert isinstance(saved, JobConfig)
    assert saved.training.steps == 4 and saved.training.seq_len == 256
    assert saved.attention.strategy == "upipe"


def test_running_again_says_complete_and_more_steps_resume(job: Path) -> None:
    again = run_train(*QUICK, f"--job.dump_folder={job}")
    assert again.returncode == 0, again.stderr
    assert "Training is complete" in again.stdout + again.stderr
    more = run_train(*QUICK, f"--job.dump_folder={job}", "--training.steps=6")
    assert more.returncode == 0, more.stderr
    assert "Training starts at step 5 of 6" in more.stdout + more.stderr
    lines = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 4, 6]


def test_an_old_name_and_a_key_without_effect_are_each_said_once(job: Path) -> None:
    flags = ["--training.batch_size=1", "--compile.backend=eager", "--training.steps=6"]
    done = run_train(*QUICK, f"--job.dump_folder={job}", *flags)
    assert done.returncode == 0, done.stderr
    logs = [path.read_text() for path in (job / "logs").rglob("*.log")]
    text = "\n".join([done.stdout, done.stderr, *logs])
    assert text.count("is now called training.local_batch_size") == 1, text
    assert text.count("compile.backend = eager has no effect") == 1, text


def test_a_half_written_newest_checkpoint_is_passed_over_and_said(job: Path) -> None:
    half = job / "checkpoint" / "step-99"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    done = run_train(*QUICK, f"--job.dump_folder={job}", "--training.steps=6")
    assert done.returncode == 0, done.stderr
    assert "step-99" in done.stdout + done.stderr
    assert half.exists(), "what a person may want to look at is not deleted"
    (half / "__0_0.distcp").unlink()
    half.rmdir()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model.flavor=8B"], ["layers.0.attention.wq.weight", "8B"]),
        (["--config=no_such.toml"], ["no_such.toml"]),
        (["--training.seq_lenn=4"], ["seq_lenn", "seq_len"]),
        (["--training.seq_len=0", "--training.steps=0"], ["training.seq_len", "training.steps"]),
        (["--parallelism.data_parallel_replicate_degree=2"], ["data_parallel_replicate_degree"]),
        (["--attention.kernel=fa4"], ["fa4"]),
    ],
)
def test_a_mistake_is_one_clear_error_before_any_worker_starts(
    flags: list[str], words: list[str], job: Path
) -> None:
    before = sorted(str(p) for p in job.rglob("*"))
    done = run_train(*QUICK, f"--job.dump_folder={job}", *flags)
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    for word in words:
        assert word in text, (word, text)
    assert "Traceback" not in text
    assert "Starting" not in text, "no worker may start"
    assert sorted(str(p) for p in job.rglob("*")) == before, "nothing is written or lost"
