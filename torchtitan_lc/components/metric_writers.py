"""Where metrics go besides the log: metrics.jsonl, TensorBoard, Weights & Biases.

A run that resumes continues what it finds. Lines and events of steps that are trained again are
dropped, so that each step appears once. A full disk ends what writes to it, not the run.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.logging import logger

if TYPE_CHECKING:
    from torchtitan_lc.config.job_config import Metrics as MetricsConfig


# Key in [metrics] -> the package that its writer needs, and what to install for it.
_PACKAGES = {
    "enable_tensorboard": ("tensorboard", "tensorboard"),
    "enable_wandb": ("wandb", "-e '.[wandb]' in the checkout"),
}


class Writer(Protocol):
    def write(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def missing_packages(config: MetricsConfig) -> list[str]:
    """What to install for the writers that the config asks for, a text for each; imports none."""
    asked = {
        "enable_tensorboard": config.enable_tensorboard,
        "enable_wandb": config.enable_wandb,
    }
    return [
        _not_installed(key)
        for key, (package, _) in _PACKAGES.items()
        if asked[key] and importlib.util.find_spec(package) is None
    ]


def _not_installed(key: str) -> str:
    package, install = _PACKAGES[key]
    return (
        f"metrics.{key} needs the package {package}, which is not installed: pip install {install}"
    )


def build_writers(
    config: MetricsConfig,
    dump_folder: Path,
    rank: int,
    start_step: int,
    config_to_show: dict[str, Any],
) -> list[Writer]:
    """The writers that the config asks for on this rank: rank 0, or with ``save_for_all_ranks``
    every rank, each in a folder ``rank_<r>`` of its own.

    Raises UserError when the package that a writer needs is not installed.
    """
    if rank != 0 and not config.save_for_all_ranks:
        return []
    writers: list[Writer] = []
    if config.enable_tensorboard:
        folder = dump_folder / config.save_tb_folder
        if config.save_for_all_ranks:
            folder = folder / f"rank_{rank}"
        writers.append(TensorBoard(folder, start_step))
    if config.enable_wandb:
        name = f"rank_{rank}" if config.save_for_all_ranks else None
        writers.append(Wandb(dump_folder, name, config_to_show))
    return writers


class _Dispensable:
    """What training goes on without: the first OSError is a warning, and the last thing it does."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stopped = False

    @contextmanager
    def _or_stop(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._stopped = True
            logger.warning(
                f"{self._name} cannot be written ({error.strerror or error}): training goes on without it"
            )


class JsonLines(_Dispensable):
    """``metrics.jsonl``: one object per logged step, readable while the run goes on."""

    def __init__(self, dump_folder: Path, start_step: int) -> None:
        path = dump_folder / "metrics.jsonl"
        super().__init__(str(path))
        with self._or_stop():
            dump_folder.mkdir(parents=True, exist_ok=True)
            _drop_lines_after(path, start_step)
            self._file = path.open("a", encoding="utf-8")

    def write(self, entry: dict[str, float | None]) -> None:
        if self._stopped:
            return
        with self._or_stop():
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()

    def close(self) -> None:
        if not self._stopped:
            with self._or_stop():
                self._file.close()


def _drop_lines_after(path: Path, start_step: int) -> None:
    """Keep the lines of steps up to ``start_step``; also drop one cut short by a crash."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if _step_of(line) <= start_step]
    if len(kept) == len(lines):
        return
    logger.info(
        f"{path}: dropped {len(lines) - len(kept)} lines of steps after {start_step}, which this "
        "run trains (again)"
    )
    rewritten = path.with_suffix(".tmp")
    rewritten.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(rewritten, path)  # at no moment is the file half-written


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


class TensorBoard(_Dispensable):
    """Event files; the viewer hides what an earlier run wrote of steps after ``start_step``."""

    def __init__(self, folder: Path, start_step: int) -> None:
        super().__init__(f"TensorBoard's folder {folder}")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(_not_installed("enable_tensorboard")) from error
        with self._or_stop():
            self._writer = SummaryWriter(str(folder), purge_step=start_step + 1)
            logger.info(f"TensorBoard logs go to {folder}")

    def write(self, step: int, values: dict[str, float]) -> None:
        if self._stopped:
            return
        with self._or_stop():
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        if not self._stopped:
            with self._or_stop():
                self._writer.close()


class Wandb(_Dispensable):
    """A Weights & Biases run, named by TorchTitan's variables WANDB_TEAM, WANDB_PROJECT and
    WANDB_RUN_NAME; the others that wandb itself reads (WANDB_RUN_ID, WANDB_TAGS, ...) work too."""

    def __init__(self, dump_folder: Path, name: str | None, config: dict[str, Any]) -> None:
        super().__init__("Weights & Biases' run")
        try:
            import wandb
        except ImportError as error:
            raise UserError(_not_installed("enable_wandb")) from error
        dump_folder.mkdir(parents=True, exist_ok=True)
        run_name = os.getenv("WANDB_RUN_NAME")
        self._run = wandb.init(
            entity=os.getenv("WANDB_TEAM"),
            project=os.getenv("WANDB_PROJECT", "torchtitan_lc"),
            name="-".join(part for part in (run_name, name) if part) or None,
            dir=str(dump_folder),
            config=config,
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        if self._stopped:
            return
        with self._or_stop():
            self._run.log(values, step=step)

    def close(self) -> None:
        if not self._stopped:
            with self._or_stop():
                self._run.finish()
