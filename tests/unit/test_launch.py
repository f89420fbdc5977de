"""The launcher: its arguments, and what it checks before any process is started."""

import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from torchtitan_lc import launch
from torchtitan_lc.config import names
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.tools import folder_lock, workers
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.parent import LAUNCHER_PID

ROOT = Path(__file__).resolve().parents[2]


def test_what_follows_the_double_dash_is_the_jobs() -> None:
    args, job = launch.split_args(
        ["--nproc_per_node", "4", "--nnodes", "2", "--log_rank", "0,5", "--", "--nnodes", "--", "x"]
    )
    assert (args.nproc_per_node, args.nnodes, args.log_rank) == (4, 2, frozenset({0, 5}))
    assert args.node_rank is None and args.rdzv_endpoint == "localhost:0"
    assert job == ["--nnodes", "--", "x"]


def test_log_rank_is_0_where_nobody_says_otherwise() -> None:
    assert launch.split_args(["--nproc_per_node", "1"])[0].log_rank == frozenset({0})


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--nproc_per_node", "0"],
        ["--nproc_per_node", "two"],
        ["--nproc_per_node", "1", "--log_rank", "a"],
        ["--nproc_per_node", "1", "--training.steps", "3"],
    ],
)
def test_a_wrong_launcher_argument_ends_with_exit_code_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        launch.split_args(argv)
    assert raised.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_a_log_rank_that_is_no_number_is_named_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOG_RANK", "a")  # which the logger reads too
    with pytest.raises(SystemExit) as raised:
        launch.main(["--nproc_per_node", "1", "--log_rank", "a"])
    assert raised.value.code == 2
    assert "LOG_RANK=a is not a comma list of ranks" in capsys.readouterr().err


def test_a_plan_and_a_dry_run_at_once_are_refused(
    no_workers: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = JobConfig()
    config.plan.enable = config.dry_run.enable = True
    monkeypatch.setattr(launch, "load_config", lambda argv: config)
    assert launch.main(["--nproc_per_node", "2"]) == 2
    assert "give one of --plan and --dry_run" in capsys.readouterr().err


def test_a_log_rank_that_does_not_exist_is_refused() -> None:
    launch.check_shown_ranks(frozenset({0, 3}), world_size=4)
    with pytest.raises(UserError, match=r"LOG_RANK names 4, .* 0 to 3"):
        launch.check_shown_ranks(frozenset({0, 4}), world_size=4)


def test_more_processes_than_gpus_are_refused_but_not_on_a_cpu() -> None:
    launch.check_processes(8, "cuda", visible_gpus=8)
    launch.check_processes(8, "cpu", visible_gpus=0)
    with pytest.raises(UserError, match="NGPU=4 .* 2 visible"):
        launch.check_processes(4, "cuda", visible_gpus=2)


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Records the commands that `main` would start, on 2 CPU ranks with a job that passes."""
    started: list[list[str]] = []

    def start(plan: workers.Workers, command: list[str]) -> int:
        assert plan.environment == {LAUNCHER_PID: str(os.getpid())}, "as workers expect it"
        started.append(command)
        return 0

    monkeypatch.chdir(tmp_path)  # of the default dump folder
    monkeypatch.setattr(workers, "run_workers", start)
    monkeypatch.setattr(launch, "load_config", lambda argv: JobConfig())
    monkeypatch.setattr(launch, "init_logger", lambda: None)
    accept = types.SimpleNamespace(check_job=lambda *job, ranks_per_node: None)
    monkeypatch.setitem(sys.modules, "torchtitan_lc.preflight", accept)
    monkeypatch.setattr("torchtitan_lc.tools.hardware.device_type", lambda: "cpu")
    return started


def test_workers_get_the_jobs_arguments_unchanged(no_workers: list[list[str]]) -> None:
    job = ["--config", "debug", "--job.description", "two words"]
    assert launch.main(["--nproc_per_node", "2", "--", *job]) == 0
    assert no_workers == [["-m", "torchtitan_lc.train", *job]]


def test_a_job_that_preflight_refuses_starts_no_worker(
    no_workers: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = []

    def refuse(
        config: JobConfig, world_size: int, device_type: str, *, ranks_per_node: int
    ) -> None:
        seen.append((world_size, device_type, ranks_per_node))
        raise UserError("first problem\nsecond problem")

    preflight = types.SimpleNamespace(check_job=refuse)
    monkeypatch.setitem(sys.modules, "torchtitan_lc.preflight", preflight)
    assert launch.main(["--nproc_per_node", "2", "--nnodes", "3"]) == 2
    assert seen == [(6, "cpu", 2)] and no_workers == []
    expected = "torchtitan_lc: this job can't run\n  first problem\n  second problem\n"
    assert capsys.readouterr().err == expected


def test_a_second_job_in_a_dump_folder_starts_no_worker(
    no_workers: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(JobConfig().job.dump_folder)
    with folder_lock.held(folder):
        assert launch.main(["--nproc_per_node", "2"]) == 2
    said = capsys.readouterr().err
    assert f"job.dump_folder = '{folder}' is in use" in said and no_workers == []
    assert launch.main(["--nproc_per_node", "2"]) == 0


def test_nodes_of_one_job_share_its_dump_folder_and_another_job_is_refused(
    no_workers: list[list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [
        "--nproc_per_node",
        "2",
        "--nnodes",
        "2",
        "--rdzv_endpoint",
        "node0:29500",
        "--rdzv_id",
    ]
    codes = []

    def first_node(plan: workers.Workers, command: list[str]) -> int:
        monkeypatch.setattr(workers, "run_workers", lambda plan, command: 0)
        codes.append(launch.main([*nodes, "run7"]))  # the second node, while the first one works
        codes.append(launch.main([*nodes, "run8"]))
        return 0

    monkeypatch.setattr(workers, "run_workers", first_node)
    assert launch.main([*nodes, "run7"]) == 0
    assert codes == [0, 2] and "is in use" in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["job.print_config", "plan.enable", "dry_run.enable"])
def test_what_starts_no_workers_takes_no_lock(
    no_workers: list[list[str]], monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    config = JobConfig()
    names.set_key(config, asked, True)
    monkeypatch.setattr(launch, "load_config", lambda argv: config)
    for command in (launch.plan, launch.dry_run):
        monkeypatch.setattr(command, "run", lambda config: 0)
    with folder_lock.held(Path(config.job.dump_folder)):
        assert launch.main(["--nproc_per_node", "2"]) == 0
    assert no_workers == []


def test_a_wrong_config_ends_with_exit_code_2_and_no_traceback(
    no_workers: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(argv: list[str]) -> JobConfig:
        raise UserError("training.stepz: unknown key")

    monkeypatch.setattr(launch, "load_config", refuse)
    assert launch.main(["--nproc_per_node", "2"]) == 2
    assert "training.stepz: unknown key" in capsys.readouterr().err and no_workers == []


def test_print_config_prints_and_starts_no_worker(
    no_workers: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = JobConfig()
    config.job.print_config = True
    monkeypatch.setattr(launch, "load_config", lambda argv: config)
    assert launch.main(["--nproc_per_node", "2"]) == 0
    assert "[training]" in capsys.readouterr().out and no_workers == []


@pytest.mark.parametrize("asked", ["--help", "--job.print_config"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_nobody_reads_to_its_end_ends_quietly(asked: str, unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "torchtitan_lc.launch", "--nproc_per_node", "1", "--", asked]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")


def test_the_config_is_read_before_torch_is_loaded() -> None:
    code = "import sys, torchtitan_lc.launch; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
