"""The launcher: its arguments, what it checks before any process, and how workers' ends become its own.

The workers here are tiny programs without torch. Each launcher is a process of its own (torch's
agent installs signal handlers), forked from one that has torch, because importing it is the cost.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from torchtitan_lc import launch
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.tools.errors import UserError

ROOT = Path(__file__).resolve().parents[2]

WORKER = """
import os, signal, subprocess, sys, time
mode, folder, rank = sys.argv[1], sys.argv[2], os.environ["RANK"]

def note(text):
    with open(f"{folder}/note{rank}", "a") as file:
        print(text, file=file)

if mode == "talk":
    print(f"out {rank} of {os.environ['WORLD_SIZE']} LOG_RANK={os.environ['LOG_RANK']}")
    print(f"err {rank}", file=sys.stderr)
elif mode == "fail" and rank == "1":
    time.sleep(0.3)
    sys.exit(7)
elif mode == "die" and rank == "0":
    os.kill(os.getpid(), signal.SIGKILL)
else:
    if mode == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        def on_sigterm(number, frame):
            note("SIGTERM")
            sys.exit(0)
        signal.signal(signal.SIGTERM, on_sigterm)
    child = subprocess.Popen(["sleep", "60"])  # as a data loader's process would be
    note(f"pid {os.getpid()}")
    note(f"pid {child.pid}")
    note("ready")
    time.sleep(60)
"""

DRIVER = """
import json, os, sys
from pathlib import Path
from torchtitan_lc.tools.workers import Workers, run_workers

def run(folder, mode, shown, nnodes, node_rank, endpoint):
    os.chdir(folder)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), fd)
    workers = Workers(
        nproc_per_node=2 // nnodes, nnodes=nnodes, node_rank=node_rank, rdzv_backend="c10d",
        rdzv_endpoint=endpoint, rdzv_id="test", shown_ranks=frozenset(shown),
        log_folder=Path(folder) / "logs",
    )
    code = run_workers(workers, ["../worker.py", mode, folder])
    sys.stderr.flush()
    return code

for case in json.loads(sys.argv[1]):
    pid = os.fork()
    if pid == 0:
        os._exit(run(**case))
    Path(case["folder"], "launcher").write_text(f"{pid} ")
for _ in json.loads(sys.argv[1]):
    pid, status = os.wait()
    print(pid, os.waitstatus_to_exitcode(status))
"""

CASES = {
    "talk": {"shown": [1]},
    "fail": {},
    "die": {},
    "wait": {},
    "stubborn": {},
    "node A": {"mode": "talk", "shown": [0, 1], "nnodes": 2, "node_rank": 1},
    "node B": {"mode": "talk", "shown": [0, 1], "nnodes": 2, "node_rank": 0},
}


@dataclass
class Launched:
    """What a launcher that has ended left behind: its exit code, its output, its workers' notes."""

    folder: Path
    code: int

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def pids(self) -> list[int]:
        text = "".join(note.read_text() for note in self.folder.glob("note*"))
        return [int(line.split()[1]) for line in text.splitlines() if line.startswith("pid ")]

    def nobody_is_left(self) -> bool:
        return _soon(lambda: not any(map(_is_running, self.pids())))


def _soon(is_true: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _signal_when_ready(folder: Path, number: int) -> None:
    """Send a signal to the launcher of a case, once both of its workers wait."""
    notes = [folder / "note0", folder / "note1"]
    is_ready = _soon(lambda: all(n.exists() and "ready" in n.read_text() for n in notes), 60)
    assert is_ready, f"{folder}: the workers did not start"
    os.kill(int((folder / "launcher").read_text()), number)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Launched]]:
    base = tmp_path_factory.mktemp("launch")
    (base / "worker.py").write_text(WORKER)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        meeting_point = f"localhost:{probe.getsockname()[1]}"
    cases = []
    for name, case in CASES.items():
        (base / name).mkdir()
        endpoint = meeting_point if "nnodes" in case else "localhost:0"
        usual = {"mode": name, "shown": [0], "nnodes": 1, "node_rank": None}
        cases.append({**usual, **case, "folder": str(base / name), "endpoint": endpoint})
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(cases)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _signal_when_ready(base / "wait", signal.SIGTERM)
        for _ in range(2):  # an impatient Ctrl-C, Ctrl-C
            _signal_when_ready(base / "stubborn", signal.SIGINT)
            time.sleep(0.3)
        codes = dict(line.split() for line in driver.communicate(timeout=60)[0].splitlines())
        pids = {name: (base / name / "launcher").read_text().strip() for name in CASES}
        yield {name: Launched(base / name, int(codes[pids[name]])) for name in CASES}
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)


def test_only_log_rank_keeps_the_terminal_and_the_others_output_is_in_files(
    launched: dict[str, Launched],
) -> None:
    run = launched["talk"]
    assert run.code == 0, run.stderr
    assert run.stdout == "out 1 of 2 LOG_RANK=1\n"
    assert "err 1" in run.stderr and "err 0" not in run.stderr
    assert (run.folder / "logs/rank0.stdout.log").read_text() == "out 0 of 2 LOG_RANK=1\n"
    assert "err 0" in (run.folder / "logs/rank0.stderr.log").read_text()
    assert not (run.folder / "logs/rank1.stdout.log").exists()


def test_a_failed_worker_gives_its_exit_code_and_one_line_that_names_its_log(
    launched: dict[str, Launched],
) -> None:
    run = launched["fail"]
    assert run.code == 7
    lines = run.stderr.splitlines()
    assert len(lines) == 1, run.stderr
    assert "rank 1 failed with exit code 7" in lines[0]
    assert str(run.folder / "logs/rank1.stderr.log") in lines[0]
    assert run.nobody_is_left()


def test_a_killed_worker_gives_128_plus_the_signal(launched: dict[str, Launched]) -> None:
    run = launched["die"]
    assert run.code == 128 + signal.SIGKILL
    assert "rank 0 was ended by SIGKILL" in run.stderr and "Traceback" not in run.stderr
    assert run.nobody_is_left()


def test_sigterm_reaches_the_workers_and_leaves_nobody_behind(
    launched: dict[str, Launched],
) -> None:
    run = launched["wait"]
    assert run.code == 128 + signal.SIGTERM
    for rank in (0, 1):
        assert "SIGTERM" in (run.folder / f"note{rank}").read_text().splitlines()
    assert len(run.pids()) == 4 and run.nobody_is_left()
    assert "Traceback" not in run.stderr


def test_workers_that_ignore_signals_are_ended_even_after_a_second_interrupt(
    launched: dict[str, Launched],
) -> None:
    run = launched["stubborn"]
    assert run.code == 128 + signal.SIGINT
    assert len(run.pids()) == 4 and run.nobody_is_left()
    assert "Traceback" not in run.stderr


def test_two_nodes_meet_whichever_of_them_was_started_first(
    launched: dict[str, Launched],
) -> None:
    outputs = [launched["node A"], launched["node B"]]
    assert [run.code for run in outputs] == [0, 0], outputs
    assert sorted(run.stdout for run in outputs) == [
        "out 0 of 2 LOG_RANK=0,1\n",
        "out 1 of 2 LOG_RANK=0,1\n",
    ]


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
def no_workers(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Records the commands that `main` would start, on 2 CPU ranks with a job that passes."""
    from torchtitan_lc.tools import workers

    started: list[list[str]] = []
    monkeypatch.setattr(workers, "run_workers", lambda w, command: started.append(command) or 0)
    monkeypatch.setattr(launch, "load_config", lambda argv: JobConfig())
    monkeypatch.setattr(launch, "init_logger", lambda: None)
    accept = types.SimpleNamespace(check_job=lambda config, world_size, device_type: None)
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

    def refuse(config: JobConfig, world_size: int, device_type: str) -> None:
        seen.append((world_size, device_type))
        raise UserError("first problem\nsecond problem")

    preflight = types.SimpleNamespace(check_job=refuse)
    monkeypatch.setitem(sys.modules, "torchtitan_lc.preflight", preflight)
    assert launch.main(["--nproc_per_node", "2", "--nnodes", "3"]) == 2
    assert seen == [(6, "cpu")] and no_workers == []
    expected = "torchtitan_lc: this job can't run\n  first problem\n  second problem\n"
    assert capsys.readouterr().err == expected


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


def test_the_config_is_read_before_torch_is_loaded() -> None:
    code = "import sys, torchtitan_lc.launch; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def _failure(exitcode: int, timestamp: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(exitcode=exitcode, timestamp=timestamp)


@pytest.mark.parametrize(
    "failures, cause",
    [
        ({0: (1, 5), 1: (7, 4)}, 1),  # the earlier one
        ({0: (-signal.SIGTERM, 4), 1: (7, 5)}, 1),  # what the agent ended is no cause
        ({0: (1, 4), 1: (2, 5)}, 1),  # an explained mistake broke the other's connection
        ({0: (-signal.SIGTERM, 4), 1: (-signal.SIGTERM, 4)}, 0),
    ],
)
def test_the_cause_is_the_rank_that_brought_the_others_down(
    failures: dict[int, tuple[int, int]], cause: int
) -> None:
    from torchtitan_lc.tools.workers import first_cause

    made = {rank: _failure(*values) for rank, values in failures.items()}
    assert first_cause(made) == (cause, failures[cause][0])  # type: ignore[arg-type]


def test_log_rank_means_global_ranks_on_every_node(tmp_path: Path) -> None:
    from torchtitan_lc.tools.workers import RankLogs

    envs = {0: {"RANK": "8"}, 1: {"RANK": "9"}}
    destinations = RankLogs(tmp_path / "logs", frozenset({9, 0})).reify(envs)
    assert destinations.stderrs == {0: str(tmp_path / "logs/rank8.stderr.log"), 1: ""}
    assert envs[1]["LOG_RANK"] == "0,9"
