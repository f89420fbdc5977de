"""scripts/env: which interpreter is taken, and when one is made. A false pip installs."""

import concurrent.futures
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.checkout_copy import copy_checkout, program, run_script


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_checkout(tmp_path)


@pytest.fixture
def no_python(checkout: Path) -> Path:
    """The checkout, with a python3 that lacks the requirements and makes a false .venv."""
    venv_python = (
        'echo pip "$@" >>"$PIP_LOG"; [[ -z "${PIP_SLEEP:-}" ]] || sleep "$PIP_SLEEP"; '
        'exit "${PIP_EXIT:-0}"'
    )
    program(
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
    script = checkout / "scripts" / "env"
    return run_script(checkout, script, extra, PYTHON="", PIP_LOG=log, **settings)


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
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: _env(no_python, PIP_SLEEP="0.5"), range(2)))
    assert [r.stdout.strip() for r in results] == [str(no_python / ".venv/bin/python")] * 2
    assert _work_done(no_python) == ["venv", "pip"]


def test_an_unknown_extra_is_named(checkout: Path) -> None:
    result = _env(checkout, "devel")
    assert result.returncode == 1 and "no extra named 'devel'" in result.stderr
