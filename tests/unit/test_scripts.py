"""The shell scripts: which interpreter is taken, and what run_train.sh makes of its surroundings.

No package is installed and no job is started: PYTHON names a script that prints what it was given.
"""

import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _load_requirements_met() -> ModuleType:
    path = ROOT / "scripts" / "requirements_met.py"
    spec = importlib.util.spec_from_file_location("requirements_met", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


requirements_met = _load_requirements_met()


@pytest.mark.parametrize(
    "specifier, version, is_allowed",
    [
        (">=2.11", "2.11", True),
        (">=2.11", "2.11.0", True),
        (">=2.11.0", "2.11", True),
        (">=2.11", "2.13.0+cpu", True),
        (">=2.11", "2.9.1", False),  # not as text
        (">=2.11", "2.11.0a0+5ed7c2c.nv25", True),  # vendors' containers number theirs so
        ("==0.18.*", "0.18.3", True),
        ("==0.18.*", "0.180", False),
        ("==4.0.0b36", "4.0.0b36", True),
        ("==4.0.0b36", "4.0.0b37", False),
        ("==2.13.0", "2.13.0+cu130", True),
        (">=1,<2", "1.9", True),
        (">=1,<2", "2.0", False),
        ("", "anything", True),
    ],
)
def test_versions_are_compared_as_numbers(specifier: str, version: str, is_allowed: bool) -> None:
    assert requirements_met.allows(specifier, version) is is_allowed


def test_each_unmet_requirement_is_named_with_what_was_found() -> None:
    installed = {"torch": "2.9", "numpy": "2.4", "from-source": ""}
    wanted = ["torch>=2.11", "numpy>=2", "tyro>=1.0", "from-source>=7", "flash-attn-4[cu13]==4.0"]
    assert requirements_met.unmet(wanted, installed.get) == [
        "torch>=2.11: found 2.9",
        "tyro>=1.0: not installed",
        "flash-attn-4[cu13]==4.0: not installed",
    ]


@pytest.mark.parametrize("requirement", ["torch~=2.1", "torch>=2; python_version<'3.12'"])
def test_a_requirement_that_cannot_be_judged_is_an_error(requirement: str) -> None:
    with pytest.raises(ValueError, match="requirement"):
        requirements_met.unmet([requirement], {"torch": "2.1"}.get)


def test_a_source_tree_without_metadata_counts_but_an_empty_folder_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "from_source").mkdir()
    (tmp_path / "from_source" / "__init__.py").touch()
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert requirements_met.installed_version("from-source") == ""
    assert requirements_met.installed_version("only-a-folder") is None
    assert requirements_met.installed_version("no-such-package") is None


def test_every_requirement_of_the_project_can_be_judged() -> None:
    extras = ["fa4", "float8", "hf", "wandb", "dev"]
    requirements = requirements_met.requirements_of(ROOT / "pyproject.toml", extras)
    assert len(requirements_met.unmet(requirements, lambda name: None)) == len(requirements)


def test_the_question_is_answered_in_a_fraction_of_a_second_without_torch() -> None:
    command = [sys.executable, "-X", "importtime", ROOT / "scripts" / "requirements_met.py", "dev"]
    best = 10.0
    for _ in range(3):  # the machine may be busy with something else
        start = time.monotonic()
        result = subprocess.run(command, capture_output=True, text=True)
        best = min(best, time.monotonic() - start)
    assert best < 0.5
    assert "torch" not in result.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the scripts need, with an interpreter that prints its arguments and settings."""
    copy = tmp_path / "a checkout"
    (copy / "scripts").mkdir(parents=True)
    for name in ("run_train.sh", "scripts/env", "scripts/requirements_met.py"):
        shutil.copy(ROOT / name, copy / name)
    (copy / "pyproject.toml").write_text(
        '[project]\ndependencies = ["pip"]\n[project.optional-dependencies]\ndev = ["pip>=1"]\n'
    )
    (copy / "constraints.txt").touch()
    (tmp_path / "bin").mkdir()
    _program(
        tmp_path / "bin" / "python",
        'printf "%s\\n" "$@"\nenv | grep -E "^(PYTORCH|OMP|PYTHONPATH)" | sort',
    )
    return copy


def _program(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


_OURS = (
    "NGPU", "LOG_RANK", "CONFIG_FILE", "NNODES", "NODE_RANK", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH",
)  # fmt: skip


def _run(
    checkout: Path, *arguments: str, script: Path | None = None, **settings: str
) -> subprocess.CompletedProcess:
    keep = {
        name: value
        for name, value in os.environ.items()
        if name not in _OURS and not name.startswith(("SLURM_", "RDZV_"))
    }
    keep["PATH"] = f"{checkout.parent / 'bin'}:{keep['PATH']}"
    keep["PYTHON"] = str(checkout.parent / "bin" / "python")
    return subprocess.run(
        [script or checkout / "run_train.sh", *arguments],
        env={**keep, **settings},
        cwd=checkout.parent,
        capture_output=True,
        text=True,
    )


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
    _program(checkout.parent / "bin" / "nvidia-smi", f"cat <<'END'\n{lines}\nEND")


def test_without_gpu_and_arguments_two_processes_run_the_debug_config(checkout: Path) -> None:
    _program(checkout.parent / "bin" / "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    _program(checkout.parent / "bin" / "find", "true")  # no /dev/nvidia0 either
    result = _run(checkout)
    assert result.stdout.splitlines()[:2] == ["-m", "torchtitan_lc.launch"]
    options = _options(result)
    assert (options["--nproc_per_node"], options["--nnodes"]) == ("2", "1")
    assert (options["--rdzv_backend"], options["--rdzv_endpoint"]) == ("c10d", "localhost:0")
    assert options["--log_rank"] == "0" and "--node_rank" not in options
    assert _job(result) == ["--config", str(checkout / "train_configs" / "debug.toml")]
    assert options["PYTHONPATH"] == str(checkout)


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
    _program(checkout.parent / "bin" / "nproc", "echo 12")
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
    _program(checkout.parent / "bin" / "scontrol", "exit 1")
    options = _options(_run(checkout, **SLURM, SLURM_JOB_NODELIST=hosts))
    assert options["--nnodes"] == "2" and options["--rdzv_endpoint"] == f"{first}:29500"
    assert (options["--rdzv_id"], options["--node_rank"]) == ("77", "1")


def test_scontrol_is_asked_for_the_hosts_where_there_is_one(checkout: Path) -> None:
    _program(
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
    assert _options(_run(checkout, script=link))["PYTHONPATH"] == str(checkout)


def test_a_python_that_does_not_exist_is_named(checkout: Path) -> None:
    result = _run(checkout, PYTHON="/no/such/python")
    assert result.returncode != 0 and "PYTHON=/no/such/python is not a program" in result.stderr


# scripts/env without PYTHON. python3 here is this interpreter; "making" is done by a false pip.


@pytest.fixture
def no_python(checkout: Path) -> Path:
    """The checkout, with a python3 that lacks the requirements and makes a false .venv."""
    venv_python = (
        'echo pip "$@" >>"$PIP_LOG"; [[ -z "${PIP_SLEEP:-}" ]] || sleep "$PIP_SLEEP"; '
        'exit "${PIP_EXIT:-0}"'
    )
    _program(
        checkout.parent / "bin" / "python3",
        'case "$*" in\n'
        "  *requirements_met*) exit 1 ;;\n"
        '  "-m venv"*) mkdir -p "$3/bin"; echo venv >>"$PIP_LOG"\n'
        f"    printf '%s\\n' '#!/usr/bin/env bash' '{venv_python}' >\"$3/bin/python\"\n"
        '    chmod +x "$3/bin/python" ;;\n'
        "esac",
    )
    return checkout


def _env(checkout: Path, extra: str = "", **settings: str) -> subprocess.CompletedProcess:
    log = str(checkout.parent / "pip.log")
    return _run(
        checkout, extra, script=checkout / "scripts" / "env", PYTHON="", PIP_LOG=log, **settings
    )


def _work_done(checkout: Path) -> list[str]:
    """The kinds of work since the last call: venv, pip."""
    log = checkout.parent / "pip.log"
    words = [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []
    log.unlink(missing_ok=True)
    return words


def test_the_active_python_is_taken_if_it_has_the_requirements(checkout: Path) -> None:
    (checkout.parent / "bin" / "python3").symlink_to(sys.executable)
    result = _env(checkout, "dev")
    assert result.stdout.strip() == str(checkout.parent / "bin" / "python3"), result.stderr
    assert not (checkout / ".venv").exists()


def test_a_venv_is_made_once_and_again_when_the_requirements_change(no_python: Path) -> None:
    for _ in range(2):
        result = _env(no_python)
        assert result.stdout.strip() == str(no_python / ".venv/bin/python"), result.stderr
    assert _work_done(no_python) == ["venv", "pip"]
    (no_python / "constraints.txt").write_text("pip==1\n")
    assert _env(no_python).returncode == 0
    assert _work_done(no_python) == ["pip"]  # brought up to date, not made anew


def test_a_venv_with_dev_serves_training_but_not_the_other_way_round(no_python: Path) -> None:
    _env(no_python)
    assert _work_done(no_python) == ["venv", "pip"]
    _env(no_python, "dev")
    assert _work_done(no_python) == ["pip"]
    _env(no_python)
    assert _work_done(no_python) == []


def test_a_failed_installation_is_not_taken_for_good(no_python: Path) -> None:
    result = _env(no_python, PIP_EXIT="1")
    assert result.returncode == 1 and "installation failed" in result.stderr
    assert result.stdout == ""
    assert _work_done(no_python) == ["venv", "pip"]
    assert _env(no_python).returncode == 0
    assert _work_done(no_python) == ["venv", "pip"]  # from the start


def test_a_users_own_venv_is_installed_into_but_never_removed(no_python: Path) -> None:
    _env(no_python)
    _work_done(no_python)
    (no_python / ".venv/.requirements").unlink()
    (no_python / ".venv/mine").touch()
    for exit_code in ("1", "1", "0"):
        _env(no_python, PIP_EXIT=exit_code)
    assert _work_done(no_python) == ["pip", "pip", "pip"]
    assert (no_python / ".venv/mine").exists()


def test_two_starts_at_once_make_one_venv(no_python: Path) -> None:
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: _env(no_python, PIP_SLEEP="0.5"), range(2)))
    assert [r.stdout.strip() for r in results] == [str(no_python / ".venv/bin/python")] * 2
    assert _work_done(no_python) == ["venv", "pip"]


def test_an_unknown_extra_is_named(checkout: Path) -> None:
    result = _env(checkout, "devel")
    assert result.returncode == 1 and "no extra named 'devel'" in result.stderr
