"""The folders that a run writes to, and whether it could: asked before it starts, not at the first save."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from torchtitan_lc.components.checkpoint_folders import checkpoint_folder, exports_folder
from torchtitan_lc.config.job_config import JobConfig


def unwritable(config: JobConfig) -> list[str]:
    """A text for each folder or file that keeps the run from writing; nothing is made."""
    problems: dict[Path, str] = {}  # by what is in the way: it may be so for several folders
    for setting, folder in _folders(config):
        nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
        if not nearest.is_dir():
            problem = f"{nearest} is a file; name another folder, or move it away"
        elif not os.access(nearest, os.W_OK | os.X_OK):
            problem = f"{nearest} cannot be written to; name another folder, or make it writable"
        else:
            continue
        problems.setdefault(nearest, f"{setting}: {problem}")
    return list(problems.values())


def _folders(config: JobConfig) -> Iterator[tuple[str, Path]]:
    """Each with the setting that it comes from; absolute paths."""
    job, checkpoint, profiling = config.job, config.checkpoint, config.profiling
    dump_folder = Path(job.dump_folder).absolute()
    of_job = f"job.dump_folder = {job.dump_folder!r}"
    yield of_job, dump_folder
    yield of_job, dump_folder / "logs"
    if checkpoint.enable and not checkpoint.load_only:
        folder = checkpoint_folder(checkpoint, dump_folder)
        if not os.path.isfile(folder):  # else choose_start says so
            yield f"checkpoint.folder = {checkpoint.folder!r}", folder
        if checkpoint.last_save_in_hf or checkpoint.hf_interval > 0:
            yield of_job, exports_folder(dump_folder)
    for key, folder_name, is_asked in (
        (
            "metrics.save_tb_folder",
            config.metrics.save_tb_folder,
            config.metrics.enable_tensorboard,
        ),
        (
            "profiling.save_traces_folder",
            profiling.save_traces_folder,
            profiling.enable_profiling,
        ),
        (
            "profiling.save_memory_snapshot_folder",
            profiling.save_memory_snapshot_folder,
            profiling.enable_memory_snapshot,
        ),
    ):
        if is_asked:
            yield f"{key} = {folder_name!r}", dump_folder / folder_name
