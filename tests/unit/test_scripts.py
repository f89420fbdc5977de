"""run_train.sh: what it makes of its arguments and its surroundings.

No job is started: PYTHON names a script that prints what it was given.
"""

import subprocess
from pathlib import Path

import pytest

from tests.unit.checkout_copy import copy_checkout, program, run_script


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_checkout(tmp_path)


def _run(checkout: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess:
    return run_script(checkout, checkout / "run_train.sh", *arguments, **settings)


def _options(result: subprocess.CompletedProcess) -> dict[str, str]:
    """What the launcher would be told: option -> value, and settings by name."""
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    ours = lines[2 : lines.index("--")]
    settings = (line.split("=", 1) for line in lines[lines.index("--") :] if "=" in line)
    return {**dict(zip(ours[::2], ours[1::2], strict=True)), **dict(map(tuple, settings))}


def _job(result: subprocess.CompletedProcess) -> list[str]:
    lines = result.stdout.splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith(("OMP", "PYTHONPATH")))
    return lines[lines.index("--") + 1 : end]


def _with_gpus(checkout: Path, count: int) -> None:
    lines = "\n".join(f"GPU {i}: NVIDIA H200 (UUID: GPU-{i})" for i in range(count))
    program(checkout.parent / "bin" / "nvidia-smi", f"cat <<'END'\n{lines}\nEND")


def test_without_gpu_and_arguments_two_processes_run_the_debug_config(checkout: Path) -> None:
    program(checkout.parent / "bin" / "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    program(checkout.parent / "bin" / "find", "true")  # no /dev/nvidia0 either
    result = _run(checkout)
    assert result.stdout.splitlines()[:2] == ["-m", "torchtitan_lc.launch"]
    options = _options(result)
    assert (options["--nproc_per_node"], options["--nnodes"]) == ("2", "1")
    assert (options["--rdzv_backend"], options["--rdzv_endpoint"]) == ("c10d", "localhost:0")
    assert options["--log_rank"] == "0" and "--node_rank" not in options
    assert _job(result) == ["--config", str(checkout / "train_configs" / "debug.toml")]
    assert options["PYTHONPATH"] == str(checkout)


def test_the_debug_config_runs_on_a_lone_gpu_too_unless_the_user_says_otherwise(
    checkout: Path,
) -> None:
    lone = ["--parallelism.context_parallel_degree", "1"]
    assert _job(_run(checkout, "--training.steps=3", NGPU="1"))[2:] == [*lone, "--training.steps=3"]
    assert _job(_run(checkout, "--config", "mine", NGPU="1")) == ["--config", "mine"]
    two_nodes = _run(checkout, NGPU="1", NNODES="2", RDZV_ENDPOINT="h:1")
    assert len(_job(two_nodes)) == 2


@pytest.mark.parametrize(
    "visible, processes",
    [(None, "4"), ("1,3", "2"), ("GPU-a", "1"), ("0,-1,2", "1"), ("0,1,2,3,4,5", "4"), ("", "2")],
)
def test_one_process_per_visible_gpu(checkout: Path, visible: str | None, processes: str) -> None:
    _with_gpus(checkout, 4)
    settings = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert _options(_run(checkout, **settings))["--nproc_per_node"] == processes


def test_ngpu_and_log_rank_are_obeyed(checkout: Path) -> None:
    _with_gpus(checkout, 4)
    options = _options(_run(checkout, NGPU="3", LOG_RANK="0,2"))
    assert (options["--nproc_per_node"], options["--log_rank"]) == ("3", "0,2")


@pytest.mark.parametrize("settings", [{"NGPU": "0"}, {"NGPU": "all"}, {"NNODES": "two"}])
def test_a_count_that_is_no_count_is_refused(checkout: Path, settings: dict[str, str]) -> None:
    result = _run(checkout, **settings)
    (name, value) = next(iter(settings.items()))
    assert result.returncode == 2 and f"{name}={value}" in result.stderr and result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "mine.toml", "--job.description", "two words"],
        ["--config=mine"],
        ["--training.steps", "3", "--job.config_file", "a/b.toml"],
        ["--job.config-file=x.toml"],
    ],
)
def test_a_config_that_is_named_replaces_the_default(checkout: Path, arguments: list[str]) -> None:
    assert _job(_run(checkout, *arguments)) == arguments


def test_config_file_in_the_environment_replaces_the_default(checkout: Path) -> None:
    assert _job(_run(checkout, "--training.steps=3", CONFIG_FILE="x")) == ["--training.steps=3"]


def test_expandable_segments_are_set_but_never_over_the_users_own(checkout: Path) -> None:
    assert _options(_run(checkout))["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        options = _options(_run(checkout, **{name: "max_split_size_mb:64"}))
        settings = {key: value for key, value in options.items() if key.startswith("PYTORCH")}
        assert settings == {name: "max_split_size_mb:64"}


def test_processes_share_the_cores(checkout: Path) -> None:
    program(checkout.parent / "bin" / "nproc", "echo 12")
    assert _options(_run(checkout, NGPU="4"))["OMP_NUM_THREADS"] == "3"
    assert _options(_run(checkout, NGPU="16"))["OMP_NUM_THREADS"] == "1"
    assert _options(_run(checkout, NGPU="4", OMP_NUM_THREADS="5"))["OMP_NUM_THREADS"] == "5"


SLURM = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "77", "SLURM_NODEID": "1", "NGPU": "8"}


@pytest.mark.parametrize(
    "hosts, first",
    [
        ("gpu7,gpu8", "gpu7"),
        ("gpu[003-006,9],login1", "gpu003"),
        ("gpu-a100-[12,15]-ib", "gpu-a100-12-ib"),
        ("rack[1-2]node[08-11]", "rack1node08"),
        ("a,b[1-2]", "a"),
        ("single", "single"),
    ],
)
def test_slurm_gives_nodes_and_meeting_point_without_scontrol(
    checkout: Path, hosts: str, first: str
) -> None:
    program(checkout.parent / "bin" / "scontrol", "exit 1")
    options = _options(_run(checkout, **SLURM, SLURM_JOB_NODELIST=hosts))
    assert options["--nnodes"] == "2" and options["--rdzv_endpoint"] == f"{first}:29500"
    assert (options["--rdzv_id"], options["--node_rank"]) == ("77", "1")


def test_scontrol_is_asked_for_the_hosts_where_there_is_one(checkout: Path) -> None:
    program(
        checkout.parent / "bin" / "scontrol",
        '[[ "$*" == "show hostnames x[5-6]" ]] && printf "x5.cluster\\nx6.cluster\\n"',
    )
    options = _options(_run(checkout, **SLURM, SLURM_JOB_NODELIST="x[5-6]"))
    assert options["--rdzv_endpoint"] == "x5.cluster:29500"


def test_the_nodes_of_a_slurm_step_count_not_those_of_its_job(checkout: Path) -> None:
    step = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "x6", "SLURM_STEP_NUM_TASKS": "1"}
    options = _options(_run(checkout, **SLURM, **step, SLURM_JOB_NODELIST="x[5-6]"))
    assert (options["--nnodes"], options["--rdzv_endpoint"]) == ("1", "localhost:0")


def test_several_slurm_tasks_on_a_node_are_refused(checkout: Path) -> None:
    step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "x", "SLURM_STEP_NUM_TASKS": "16"}
    result = _run(checkout, **SLURM, **step)
    assert result.returncode == 2 and "--ntasks-per-node=1" in result.stderr


def test_settings_of_our_own_win_over_slurms(checkout: Path) -> None:
    own = {"NNODES": "3", "RDZV_ENDPOINT": "h:1", "RDZV_ID": "me", "NODE_RANK": "2"}
    options = _options(_run(checkout, **SLURM, SLURM_JOB_NODELIST="x[5-6]", **own))
    got = [options[f"--{n}"] for n in ("nnodes", "rdzv_endpoint", "rdzv_id", "node_rank")]
    assert got == ["3", "h:1", "me", "2"]


def test_several_nodes_without_a_meeting_point_are_refused(checkout: Path) -> None:
    result = _run(checkout, NNODES="2")
    assert result.returncode == 2 and "RDZV_ENDPOINT=host:port" in result.stderr


def test_run_train_works_through_a_symlink(checkout: Path) -> None:
    link = checkout.parent / "bin" / "train"
    link.symlink_to(checkout / "run_train.sh")
    assert _options(run_script(checkout, link))["PYTHONPATH"] == str(checkout)


def test_a_python_that_does_not_exist_is_named(checkout: Path) -> None:
    result = _run(checkout, PYTHON="/no/such/python")
    assert result.returncode == 2 and "PYTHON=/no/such/python is not a program" in result.stderr


def test_convert_hf_finds_its_python_from_any_folder(checkout: Path) -> None:
    result = run_script(checkout, checkout / "scripts/convert_hf", "to", "a folder", "b")
    assert result.returncode == 0, result.stderr
    script = str(checkout / "scripts/convert_hf.py")
    assert result.stdout.splitlines()[:4] == [script, "to", "a folder", "b"]


def test_the_test_suite_runs_one_thread_per_process_unless_the_user_says_otherwise(
    checkout: Path,
) -> None:
    def run(**settings: str) -> list[str]:
        result = run_script(checkout, checkout / "scripts/test", "-k", "launch", **settings)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    lines = run()
    assert lines[:2] == ["-m", "pytest"] and "launch" in lines
    assert "OMP_NUM_THREADS=1" in lines
    assert "OMP_NUM_THREADS=5" in run(OMP_NUM_THREADS="5")


def test_files_of_the_whole_suite_are_spread_over_the_cores_where_there_is_no_gpu(
    checkout: Path,
) -> None:
    def run(*arguments: str, cores: int = 4) -> list[str]:
        program(checkout.parent / "bin" / "getconf", f"echo {cores}")
        result = run_script(checkout, checkout / "scripts/test", *arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    program(checkout.parent / "bin" / "nvidia-smi", "exit 9")
    assert run()[2:] == ["-m", "not gpu", "-n", "4", "--dist", "loadfile", *run()[8:]]
    assert "8" in run(cores=64) and "64" not in run(cores=64)
    assert "-n" not in run("tests/unit")
    _with_gpus(checkout, 1)
    assert "-n" not in run() and "not gpu" not in run()
