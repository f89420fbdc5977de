"""Log lines and who writes them, hardware facts, traces; on a CPU, in seconds."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torchtitan_lc.config.job_config import Profiling
from torchtitan_lc.tools import hardware
from torchtitan_lc.tools.logging import init_logger, logger, shown_ranks, warn_once
from torchtitan_lc.tools.profiling import memory_snapshots, step_traces


@pytest.fixture
def log_as(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator["LogAs"]:
    """Logs INFO "info" and WARNING "careful" as a rank; hands back the lines. Undoes the set-up."""
    kept = (logger.handlers, logger.propagate, logger.level)
    yield LogAs(monkeypatch, capsys)
    logger.handlers, logger.propagate = kept[:2]
    logger.setLevel(kept[2])


class LogAs:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, rank: str | None, log_rank: str | None) -> list[str]:
        for name, value in (("RANK", rank), ("LOG_RANK", log_rank)):
            if value is None:
                self._monkeypatch.delenv(name, raising=False)
            else:
                self._monkeypatch.setenv(name, value)
        init_logger()
        logger.info("info")
        logger.warning("careful")
        captured = self._capsys.readouterr()
        assert captured.out == ""
        return captured.err.splitlines()


TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"


def test_a_line_looks_as_in_torchtitan(log_as: LogAs) -> None:
    lines = log_as("0", "0")
    assert re.fullmatch(rf"\[titan\] {TIME} - root - INFO - info", lines[0])
    assert re.fullmatch(rf"\[titan\] {TIME} - root - WARNING - careful", lines[1])


def test_ranks_outside_log_rank_write_only_warnings_with_their_rank(log_as: LogAs) -> None:
    lines = log_as("3", "0")
    assert len(lines) == 1
    assert re.fullmatch(rf"\[rank3\]:\[titan\] {TIME} - root - WARNING - careful", lines[0])


def test_with_several_writers_each_line_names_its_rank(log_as: LogAs) -> None:
    lines = log_as("3", "0,3")
    assert len(lines) == 2 and all(line.startswith("[rank3]:[titan] ") for line in lines)


def test_rank_0_writes_where_log_rank_is_not_set_or_empty(log_as: LogAs) -> None:
    assert len(log_as("0", None)) == len(log_as("0", "")) == 2
    assert len(log_as("1", None)) == 1


def test_the_launcher_writes_whatever_log_rank_is(log_as: LogAs) -> None:
    assert len(log_as(None, "5")) == 2


def test_a_second_set_up_does_not_write_twice(log_as: LogAs) -> None:
    log_as("0", "0")
    assert len(log_as("0", "0")) == 2


def test_lines_come_once_even_if_a_package_puts_a_handler_on_the_root_logger(
    log_as: LogAs,
) -> None:
    other = logging.StreamHandler()
    logging.getLogger().addHandler(other)
    try:
        assert len(log_as("0", "0")) == 2
    finally:
        logging.getLogger().removeHandler(other)


def test_a_log_rank_that_is_no_list_of_numbers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_RANK", "0;1")
    with pytest.raises(ValueError, match="LOG_RANK='0;1'"):
        shown_ranks()


def test_a_warning_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="torchtitan_lc"):
        logger.addHandler(caplog.handler)
        try:
            for _ in range(3):
                warn_once("the sky is falling (test)")
        finally:
            logger.removeHandler(caplog.handler)
    assert len(set(map(id, caplog.records))) == 1


@pytest.mark.parametrize(
    "name, teraflops",
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GB200", 2500),
    ],
)
def test_peak_flops_are_the_dense_bf16_figures(name: str, teraflops: int) -> None:
    assert hardware.peak_flops(name) == teraflops * 1e12


@pytest.mark.parametrize(
    "name", ["CPU (x86_64)", "NVIDIA A1000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]
)
def test_no_peak_is_made_up(name: str) -> None:
    assert hardware.peak_flops(name) is None


def test_versions_name_torch_and_say_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_OPTIONAL_PACKAGES", ("pytest", "no-such-package"))
    found = hardware.versions()
    assert found["torch"] == torch.__version__
    assert found["pytest"] == pytest.__version__
    assert found["no-such-package"] == "not found"


def test_the_allocator_settings_shown_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert hardware.allocator_settings() == "max_split_size_mb:64"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert hardware.allocator_settings() == "default"


def test_the_cpu_is_described_with_its_memory() -> None:
    assert re.fullmatch(
        r"CPU \(\w+\), \d+\.\d GiB of host memory, \d+ thread\(s\) a rank",
        hardware.describe_device("cpu"),
    )


def test_each_trace_bears_the_number_of_its_last_step(tmp_path: Path) -> None:
    config = Profiling(enable_profiling=True, profile_freq=4, profiler_warmup=1, profiler_active=1)
    with step_traces(config, str(tmp_path), rank=3, first_step=101, device_type="cpu") as step_done:
        for step in range(101, 110):
            with torch.profiler.record_function(f"marker {step}"):
                torch.ones(2) + 1
            step_done()
    traces = {p.parent.name: p for p in tmp_path.glob("profile_traces/*/rank3_trace.json")}
    assert set(traces) == {"iteration_104", "iteration_108"}
    names = {
        event.get("name")
        for event in json.loads(traces["iteration_104"].read_text())["traceEvents"]
    }
    assert {name for name in names if str(name).startswith("marker")} == {"marker 104"}


def test_switched_off_profiling_writes_nothing(tmp_path: Path) -> None:
    for context in (step_traces, memory_snapshots):
        with context(Profiling(), str(tmp_path), 0, 1, "cpu") as step_done:
            step_done()
    assert list(tmp_path.iterdir()) == []


def test_a_schedule_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    config = Profiling(enable_profiling=True, profile_freq=3)
    with (
        pytest.raises(ValueError, match=r"profile_freq=3 .*warmup=3 .*active=1"),
        step_traces(config, str(tmp_path), 0, 1, "cpu"),
    ):
        pass


def test_memory_snapshots_on_a_cpu_warn_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(logger, "warning", warnings.append)
    config = Profiling(enable_memory_snapshot=True)
    with memory_snapshots(config, str(tmp_path), 0, 1, "cpu") as step_done:
        step_done()
    assert len(warnings) == 1 and "enable_memory_snapshot has no effect" in warnings[0]
    assert list(tmp_path.iterdir()) == []
