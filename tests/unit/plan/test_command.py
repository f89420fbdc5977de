"""`--plan` through the launcher: what it prints and how it ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torchtitan_lc.launch import main

JOB = ["--model.flavor", "8B", "--parallelism.context_parallel_degree", "8"]


def launch(*flags: str) -> int:
    return main(["--nproc_per_node", "1", "--", *JOB, *flags])


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--training.seq_len", "128K", "--plan"], 0),
        (["--training.seq_len", "5M", "--plan"], 3),
        (["--training.seq_len", "128K", "--plan", "--plan.gpus_per_node", "7"], 2),
        (["--plan", "--plan.hardware", "custom"], 2),
        (["--plan", "--plan.nodes", "0"], 2),
        (["--plan", "--model.flavor", "9B"], 2),
    ],
)
def test_the_exit_code_says_whether_it_fits(
    flags: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(*flags) == code
    said = capsys.readouterr()
    assert ("It fits" in said.out) == (code == 0)
    assert ("It does not fit" in said.out) == (code == 3)
    assert ("can't run" in said.err) == (code == 2)


def test_figures_of_ones_own_replace_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--training.seq_len", "128K", "--plan", "--plan.machine.memory_gib", "20"]
    assert launch(*flags) == 3
    assert "of 20.0" in capsys.readouterr().out


def test_a_machine_that_no_table_knows(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {
        "memory_gib": 100,
        "host_memory_gib": 1000,
        "peak_tflops": 500,
        "matrix_tflops": 400,
        "attention_forward_tflops": 300,
        "attention_backward_tflops": 250,
        "memory_gbs": 3000,
        "link_gbs": 100,
        "network_gbs": 20,
        "pcie_gbs": 20,
    }
    flags = [f"--plan.machine.{name}={value}" for name, value in figures.items()]
    assert launch("--plan", "--plan.hardware", "custom", *flags) == 0
    assert "all from [plan.machine]" in capsys.readouterr().out


def test_a_plan_loads_no_compiler() -> None:
    """Half a second each: what makes a plan slow is what it imports."""
    code = (
        "import sys; from torchtitan_lc.launch import main; "
        f"main(['--nproc_per_node', '1', '--', *{JOB}, '--plan']); "
        "print([m for m in ('torch._dynamo', 'tensorboard', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
