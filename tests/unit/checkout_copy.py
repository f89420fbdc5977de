"""A copy of the shell scripts that tests may run: nothing is installed, no job is started."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def copy_checkout(tmp_path: Path) -> Path:
    """Copies the scripts. Beside them, bin/python prints its arguments and settings."""
    copy = tmp_path / "a checkout"
    (copy / "scripts").mkdir(parents=True)
    for name in (
        "run_train.sh",
        "scripts/convert_hf",
        "scripts/env",
        "scripts/requirements_met.py",
        "scripts/test",
    ):
        shutil.copy(ROOT / name, copy / name)
    (copy / "pyproject.toml").write_text(
        '[project]\ndependencies = ["pip"]\n[project.optional-dependencies]\ndev = ["pip>=1"]\n'
    )
    (copy / "constraints.txt").touch()
    (tmp_path / "bin").mkdir()
    program(
        tmp_path / "bin" / "python",
        'printf "%s\\n" "$@"\nenv | grep -E "^(PYTORCH|OMP|PYTHONPATH)" | sort',
    )
    return copy


def program(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


_OURS = (
    "NGPU", "LOG_RANK", "CONFIG_FILE", "NNODES", "NODE_RANK", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH",
)  # fmt: skip


def run_script(
    checkout: Path, script: Path, *arguments: str, **settings: str
) -> subprocess.CompletedProcess:
    """Runs a script with ``settings`` in its environment, and none of ours that may be set here.

    bin/ comes first on PATH, and PYTHON names its `python`.
    """
    keep = {
        name: value
        for name, value in os.environ.items()
        if name not in _OURS and not name.startswith(("SLURM_", "RDZV_"))
    }
    keep["PATH"] = f"{checkout.parent / 'bin'}:{keep['PATH']}"
    keep["PYTHON"] = str(checkout.parent / "bin" / "python")
    return subprocess.run(
        [script, *arguments],
        env={**keep, **settings},
        cwd=checkout.parent,
        capture_output=True,
        text=True,
    )
