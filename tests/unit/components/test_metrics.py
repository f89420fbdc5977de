"""FLOP counts, speed per device, and what each file and the terminal get to see."""

import io
import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan_lc.components.metrics import MetricsProcessor, flops_per_token
from torchtitan_lc.config.job_config import Metrics
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.logging import init_logger, logger

KEYS = [
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tps",
    "tflops",
    "mfu",
    "mfu_causal",
    "memory_gib",
    "n_tokens_seen",
    "time_s",
]
LLAMA_8B = {"n_params_without_embedding": 7_504_924_672, "n_layers": 32, "n_heads": 32}


class FakeClock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return FakeClock(monkeypatch)


def processor(folder: Path, config: Metrics | None = None, **changes: Any) -> MetricsProcessor:
    settings: dict[str, Any] = {
        "rank": 0,
        "device": torch.device("cpu"),
        "peak_flops": 1e12,
        "flops": (4e9, 3e9),
        "non_dp_size": 1,
        "total_steps": 100,
    }
    return MetricsProcessor(config or Metrics(log_freq=2), folder, **(settings | changes))


def log(metrics: MetricsProcessor, step: int, loss: float = 2.5) -> dict[str, float | None]:
    return metrics.log(
        step, loss=loss, max_loss=3.0, grad_norm=1.25, lr=1e-3, n_tokens_seen=step * 1000
    )


def logged_steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]


# ---- floating point operations ---------------------------------------------------------------


def test_flops_of_llama_8b_at_131072_are_the_published_terms() -> None:
    full, causal = flops_per_token(**LLAMA_8B, head_dim=128, seq_len=131072)
    attention = 12 * 32 * 4096 * 131072
    assert attention == pytest.approx(2.06e11, rel=2e-3)
    assert full == 6 * 7_504_924_672 + attention
    assert full - attention == pytest.approx(4.5e10, rel=2e-3)


def test_causal_halves_the_attention_term_and_nothing_else() -> None:
    full, causal = flops_per_token(**LLAMA_8B, head_dim=128, seq_len=131072)
    matrices = 6 * 7_504_924_672
    assert causal - matrices == (full - matrices) / 2


# ---- speed -----------------------------------------------------------------------------------


def test_tps_and_mfu_are_per_device_and_per_second(tmp_path: Path, clock: FakeClock) -> None:
    metrics = processor(tmp_path, non_dp_size=4)
    for _ in range(2):
        metrics.add(800, 0.5)
        clock.now += 4.0
    entry = log(metrics, 2)
    assert entry["tps"] == 1600 / 8.0 / 4
    assert entry["tflops"] == pytest.approx(0.2)
    assert entry["mfu"] == pytest.approx(20.0)
    assert entry["mfu_causal"] == pytest.approx(15.0)
    assert entry["time_s"] == 4.0


def test_twice_the_ranks_per_row_at_twice_the_row_speed_leave_mfu_as_it_is(
    tmp_path: Path, clock: FakeClock
) -> None:
    found = []
    for non_dp_size, seconds in ((2, 8.0), (4, 4.0)):
        metrics = processor(tmp_path / str(non_dp_size), non_dp_size=non_dp_size)
        metrics.add(800, 0.0)
        clock.now += seconds
        entry = log(metrics, 1)
        found.append((entry["tps"], entry["tflops"], entry["mfu"], entry["mfu_causal"]))
    assert found[0] == found[1]


def test_a_line_counts_only_what_happened_since_the_line_before(
    tmp_path: Path, clock: FakeClock
) -> None:
    metrics = processor(tmp_path)
    metrics.add(1_000_000, 0.0)
    clock.now += 1.0
    log(metrics, 2)
    metrics.add(300, 0.0)
    clock.now += 6.0
    entry = log(metrics, 4)
    assert (entry["tps"], entry["time_s"]) == (50.0, 3.0)


def test_seconds_per_step_after_a_resume_count_the_steps_really_done(
    tmp_path: Path, clock: FakeClock
) -> None:
    metrics = processor(tmp_path, Metrics(log_freq=10), start_step=7)
    clock.now += 9.0
    assert log(metrics, 10)["time_s"] == 3.0


def test_mfu_is_null_where_the_peak_is_unknown(tmp_path: Path) -> None:
    metrics = processor(tmp_path, peak_flops=None)
    log(metrics, 1)
    entry = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert entry["mfu"] is None and entry["mfu_causal"] is None
    assert entry["tflops"] > 0 or entry["tps"] == 0


def test_step_one_and_every_log_freq_are_logged(tmp_path: Path) -> None:
    metrics = processor(tmp_path, Metrics(log_freq=10))
    assert [s for s in range(1, 31) if metrics.should_log(s)] == [1, 10, 20, 30]


def test_memory_on_a_cpu_is_the_resident_set(tmp_path: Path) -> None:
    memory = log(processor(tmp_path), 1)["memory_gib"]
    assert memory is not None and 0.05 < memory < 1000


# ---- the line --------------------------------------------------------------------------------


def test_the_line_is_titans(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = processor(tmp_path)
    metrics.add(5000, 0.0)
    with caplog.at_level(logging.INFO, logger="torchtitan_lc"):
        log(metrics, 10, loss=7.12344)
    number = r"[\d,]+(\.\d+)?"
    assert re.fullmatch(
        r"step: 10  loss: 7\.1234  grad_norm: 1\.2500  "
        rf"memory: \d+\.\d\dGiB\(\d+\.\d%\)  tps: {number}  tflops: {number}  mfu: {number}%",
        caplog.records[-1].message,
    )


def test_mfu_in_the_line_is_not_a_number_where_the_peak_is_unknown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="torchtitan_lc"):
        log(processor(tmp_path, peak_flops=None), 1)
    assert caplog.records[-1].message.endswith("mfu: n/a")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "disabled", "coloured"),
    [(Terminal(), False, True), (Terminal(), True, False), (io.StringIO(), False, False)],
)
def test_colours_only_on_a_terminal_and_only_if_wanted(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    stderr: io.StringIO,
    disabled: bool,
    coloured: bool,
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    with (
        processor(tmp_path, Metrics(disable_color_printing=disabled), rank=1) as metrics,
        caplog.at_level(logging.INFO, logger="torchtitan_lc"),
    ):
        log(metrics, 1)
    assert ("\033[" in caplog.records[-1].message) == coloured


# ---- the progress bar ------------------------------------------------------------------------


@contextmanager
def console(stream: io.StringIO) -> Iterator[io.StringIO]:
    """The stream as stderr, with the real log handler on it."""
    before = list(logger.handlers), logger.propagate, logger.level
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        init_logger()
        try:
            yield stream
        finally:
            logger.handlers, logger.propagate = before[:2]
            logger.setLevel(before[2])


def test_a_terminal_shows_steps_done_and_log_lines_do_not_tear_the_bar(tmp_path: Path) -> None:
    plain = Metrics(disable_color_printing=True)
    with console(Terminal()) as shown, processor(tmp_path, plain, start_step=40) as metrics:
        metrics.step_done(41)
        log(metrics, 42)
        metrics.step_done(42)
    text = shown.getvalue()
    assert "40/100" in text
    # The bar is wiped (blanks, carriage return) before the line, so the line starts a row.
    assert re.search(r"\r +\r\[titan\] .* step: 42  loss: .*\n", text)


def test_a_log_file_gets_no_bar(tmp_path: Path) -> None:
    with console(io.StringIO()) as written, processor(tmp_path) as metrics:
        metrics.step_done(1)
        log(metrics, 2)
    assert re.fullmatch(r"\[titan\] .* step:  2  loss: .*\n", written.getvalue())


def test_ranks_other_than_zero_show_no_bar(tmp_path: Path) -> None:
    with console(Terminal()) as shown, processor(tmp_path, rank=1) as metrics:
        metrics.step_done(1)
    assert shown.getvalue() == ""


def test_log_lines_go_their_usual_way_after_the_bar_is_closed(tmp_path: Path) -> None:
    with console(Terminal()) as shown:
        handlers = list(logger.handlers)
        with processor(tmp_path):
            assert logger.handlers != handlers
        assert logger.handlers == handlers
    assert shown.getvalue().endswith("\r")


# ---- files -----------------------------------------------------------------------------------


def test_metrics_jsonl_has_exactly_the_promised_keys(tmp_path: Path) -> None:
    log(processor(tmp_path), 1)
    entry = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert list(entry) == KEYS
    assert (entry["step"], entry["loss"], entry["n_tokens_seen"]) == (1, 2.5, 1000)


def test_a_loss_that_is_not_a_number_is_null_in_strict_json(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    log(processor(tmp_path), 1, loss=math.nan)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=refuse)["loss"] is None


def test_a_resumed_run_continues_metrics_jsonl_with_each_step_once(tmp_path: Path) -> None:
    first = processor(tmp_path)
    for step in (1, 2, 4, 6):
        log(first, step)
    second = processor(tmp_path, start_step=4)  # the checkpoint of step 4; 6 is trained again
    for step in (6, 8):
        log(second, step)
    assert logged_steps(tmp_path) == [1, 2, 4, 6, 8]


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path: Path) -> None:
    log(processor(tmp_path), 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    log(processor(tmp_path, start_step=1), 2)
    assert logged_steps(tmp_path) == [1, 2]


def test_a_new_run_in_an_old_folder_does_not_mix_with_the_old_one(tmp_path: Path) -> None:
    log(processor(tmp_path), 2)
    log(processor(tmp_path), 1)
    assert logged_steps(tmp_path) == [1]


@pytest.fixture
def quiet_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard's own thread prints what ends it, beside the warning that is ours."""
    monkeypatch.setattr(threading, "excepthook", lambda how: None)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_full_disk_is_warned_of_once_for_each_file_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, quiet_threads: None
) -> None:
    with processor(tmp_path, Metrics(enable_tensorboard=True)) as metrics:
        log(metrics, 2)
        (events,) = (tmp_path / "tb").iterdir()
        events.unlink()
        events.symlink_to("/dev/full")  # it is opened anew for each event
        assert metrics._json is not None
        with open("/dev/full", "w") as full:
            os.dup2(full.fileno(), metrics._json._file.fileno())
        caplog.clear()
        for step in (4, 6, 8):
            entry = log(metrics, step)
    assert entry["step"] == 8
    said = sorted(r.message for r in caplog.records if r.levelno == logging.WARNING)
    assert len(said) == 2, said
    assert said[0].startswith(f"{tmp_path / 'metrics.jsonl'} cannot be written (No space left")
    assert said[1].startswith(f"TensorBoard's folder {tmp_path / 'tb'} cannot be written (No space")
    assert logged_steps(tmp_path) == [2]


def test_metrics_files_that_cannot_be_opened_keep_no_run_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, quiet_threads: None
) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "tb").touch()
    with processor(tmp_path, Metrics(enable_tensorboard=True)) as metrics:
        log(metrics, 2)
    assert [r.levelname for r in caplog.records].count("WARNING") == 2


def test_only_rank_zero_writes_files(tmp_path: Path) -> None:
    config = Metrics(enable_tensorboard=True)
    with processor(tmp_path, config, rank=1) as metrics:
        log(metrics, 1)
    assert list(tmp_path.iterdir()) == []


def test_save_for_all_ranks_gives_each_rank_a_tensorboard_folder_but_one_jsonl(
    tmp_path: Path,
) -> None:
    config = Metrics(enable_tensorboard=True, save_for_all_ranks=True)
    for rank in (0, 1):
        with processor(tmp_path, config, rank=rank) as metrics:
            log(metrics, 1)
    assert sorted(p.name for p in (tmp_path / "tb").iterdir()) == ["rank_0", "rank_1"]
    assert logged_steps(tmp_path) == [1]


def test_tensorboard_has_titans_names_and_the_logged_values(
    tmp_path: Path, clock: FakeClock
) -> None:
    with processor(tmp_path, Metrics(enable_tensorboard=True)) as metrics:
        metrics.add(800, 1.0)
        clock.now += 4.0
        metrics.log(
            1,
            loss=2.5,
            max_loss=3.0,
            grad_norm=1.25,
            lr=1e-3,
            n_tokens_seen=800,
            extra={"tiles": 3.0},
        )
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    values = {name: events.Scalars(name)[0].value for name in events.Tags()["scalars"]}
    expected = {
        "loss_metrics/global_avg_loss": 2.5,
        "loss_metrics/global_max_loss": 3.0,
        "grad_norm": 1.25,
        "lr": pytest.approx(1e-3),
        "n_tokens_seen": 800,
        "throughput(tps)": 200,
        "tflops": pytest.approx(0.8),
        "mfu(%)": pytest.approx(80.0),
        "mfu_causal(%)": pytest.approx(60.0),
        "time_metrics/end_to_end(s)": 4.0,
        "time_metrics/data_loading(s)": 1.0,
        "time_metrics/data_loading(%)": 25.0,
        "tiles": 3.0,
    }
    assert {name: values[name] for name in expected} == expected
    memory = {name for name in values if name.startswith("memory/")}
    assert memory == {
        "memory/max_active(GiB)",
        "memory/max_active(%)",
        "memory/max_reserved(GiB)",
        "memory/max_reserved(%)",
        "memory/num_alloc_retries",
        "memory/num_ooms",
    }


def test_tensorboard_shows_a_step_once_after_a_resume(tmp_path: Path) -> None:
    config = Metrics(enable_tensorboard=True)
    for start_step, steps in ((0, (2, 4, 6)), (4, (6, 8))):
        with processor(tmp_path, config, start_step=start_step) as metrics:
            for step in steps:
                log(metrics, step)
        time.sleep(1.1)  # event files are ordered by the second in their name
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [event.step for event in events.Scalars("grad_norm")] == [2, 4, 6, 8]


@pytest.mark.parametrize(
    ("field", "module", "fix"),
    [
        ("enable_wandb", "wandb", "-e '.[wandb]'"),
        ("enable_tensorboard", "torch.utils.tensorboard", "pip install tensorboard"),
    ],
)
def test_a_missing_package_is_a_users_error_that_names_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, module: str, fix: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    config = Metrics()
    setattr(config, field, True)
    with pytest.raises(UserError, match=re.escape(fix)):
        processor(tmp_path, config)


def test_wandb_gets_the_config_and_each_logged_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Run:
        def __init__(self) -> None:
            self.logged: list[tuple[int, dict[str, float]]] = []
            self.settings: dict[str, Any] = {}
            self.finished = False

        def init(self, **settings: Any) -> "Run":
            self.settings = settings
            return self

        def log(self, values: dict[str, float], step: int) -> None:
            self.logged.append((step, values))

        def finish(self) -> None:
            self.finished = True

    wandb = Run()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_PROJECT", "long")
    with processor(tmp_path, Metrics(enable_wandb=True), config_to_show={"model": "x"}) as metrics:
        log(metrics, 1)
    assert wandb.settings["config"] == {"model": "x"} and wandb.settings["project"] == "long"
    assert [(step, values["lr"]) for step, values in wandb.logged] == [(1, 1e-3)]
    assert wandb.finished
