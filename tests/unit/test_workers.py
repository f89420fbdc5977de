"""The workers of one node: where their output goes, and how their ends become the launcher's own.

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
from typing import Any

import pytest

from torchtitan_lc.tools import parent
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.workers import RankLogs, Workers, first_cause, run_workers

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
elif mode == "orphan":
    from torchtitan_lc.tools.parent import end_with_launcher, is_launched
    assert is_launched()
    end_with_launcher()
    note(f"pid {os.getpid()}")
    note("ready")
    time.sleep(60)
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
from torchtitan_lc.tools.parent import LAUNCHER_PID
from torchtitan_lc.tools.workers import Workers, run_workers

def run(folder, mode, shown, nnodes, node_rank, endpoint):
    os.chdir(folder)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), fd)
    workers = Workers(
        nproc_per_node=2 // nnodes, nnodes=nnodes, node_rank=node_rank, rdzv_backend="c10d",
        rdzv_endpoint=endpoint, rdzv_id="test", shown_ranks=frozenset(shown),
        log_folder=Path(folder) / "logs", environment={LAUNCHER_PID: str(os.getpid())},
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

CASES: dict[str, dict[str, Any]] = {
    "talk": {"shown": [1]},
    "fail": {},
    "die": {},
    "wait": {},
    "stubborn": {},
    "orphan": {},
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
        _signal_when_ready(base / "orphan", signal.SIGKILL)
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
    assert len(run.stderr.splitlines()) == 1 and "ended by SIGTERM" in run.stderr


def test_workers_that_ignore_signals_are_ended_even_after_a_second_interrupt(
    launched: dict[str, Launched],
) -> None:
    run = launched["stubborn"]
    assert run.code == 128 + signal.SIGINT
    assert len(run.pids()) == 4 and run.nobody_is_left()
    assert "Traceback" not in run.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_workers_end_with_a_launcher_that_is_killed(launched: dict[str, Launched]) -> None:
    run = launched["orphan"]
    assert run.code == -signal.SIGKILL
    assert len(run.pids()) == 2 and run.nobody_is_left()


def test_only_a_child_of_the_launcher_is_one_of_its_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(parent.LAUNCHER_PID, raising=False)
    assert not parent.is_launched()
    monkeypatch.setenv(parent.LAUNCHER_PID, str(os.getpid()))  # inherited from a worker
    assert not parent.is_launched()
    monkeypatch.setenv(parent.LAUNCHER_PID, str(os.getppid()))
    assert parent.is_launched()


def test_two_nodes_meet_whichever_of_them_was_started_first(
    launched: dict[str, Launched],
) -> None:
    outputs = [launched["node A"], launched["node B"]]
    assert [run.code for run in outputs] == [0, 0], outputs
    assert sorted(run.stdout for run in outputs) == [
        "out 0 of 2 LOG_RANK=0,1\n",
        "out 1 of 2 LOG_RANK=0,1\n",
    ]


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
    made = {rank: _failure(*values) for rank, values in failures.items()}
    assert first_cause(made) == (cause, failures[cause][0])  # type: ignore[arg-type]


def test_log_rank_means_global_ranks_on_every_node(tmp_path: Path) -> None:
    envs = {0: {"RANK": "8"}, 1: {"RANK": "9"}}
    destinations = RankLogs(tmp_path / "logs", frozenset({9, 0}), {"MORE": "x"}).reify(envs)
    assert destinations.stderrs == {0: str(tmp_path / "logs/rank8.stderr.log"), 1: ""}
    assert envs[1]["LOG_RANK"] == "0,9" and envs[0]["MORE"] == envs[1]["MORE"] == "x"


def test_a_log_folder_that_cannot_be_made_is_a_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    asked = Workers(
        nproc_per_node=1,
        nnodes=1,
        node_rank=None,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_id="test",
        shown_ranks=frozenset({0}),
        log_folder=tmp_path / "file" / "logs",
    )
    with pytest.raises(
        UserError, match=r"job.dump_folder: .*/file/logs: Not a directory; name another"
    ):
        run_workers(asked, ["-c", "raise SystemExit(1)"])
