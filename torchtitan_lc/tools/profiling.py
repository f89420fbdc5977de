"""Traces of steps and snapshots of GPU memory, as TorchTitan writes them.

    <dump_folder>/<save_traces_folder>/iteration_20/rank3_trace.json
    <dump_folder>/<save_memory_snapshot_folder>/iteration_20/rank3_memory_snapshot.pickle
                                                iteration_24_exit/...   (memory ran out in step 24)

Both contexts hand back a function to call once after every step, which does nothing where its
switch is off.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from torchtitan_lc.config.job_config import Profiling
from torchtitan_lc.tools.logging import logger

StepDone = Callable[[], None]

_MEMORY_EVENTS = 100_000  # the newest allocations and frees that a snapshot tells about


def _nothing() -> None:
    return


@contextmanager
def step_traces(
    config: Profiling, dump_folder: str, rank: int, first_step: int, device_type: str
) -> Iterator[StepDone]:
    """Record profiler_active steps in each profile_freq, after profiler_warmup discarded ones.

    ``first_step`` is the number of the step that runs next (1, or what follows a checkpoint).
    Raises ValueError if warm-up and recording do not fit into profile_freq steps.
    """
    if not config.enable_profiling:
        yield _nothing
        return
    wait = config.profile_freq - config.profiler_warmup - config.profiler_active
    if wait < 0:
        raise ValueError(
            f"profile_freq={config.profile_freq} is less than profiler_warmup="
            f"{config.profiler_warmup} + profiler_active={config.profiler_active}"
        )
    folder = Path(dump_folder) / config.save_traces_folder

    def write(profiler: torch.profiler.profile) -> None:
        started = time.monotonic()
        step = first_step - 1 + profiler.step_num
        path = _file(folder, f"iteration_{step}", f"rank{rank}_trace.json")
        profiler.export_chrome_trace(str(path))
        logger.info(f"Wrote the trace {path} in {time.monotonic() - started:.1f} s")

    activities = [torch.profiler.ProfilerActivity.CPU]
    if device_type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(
            wait=wait, warmup=config.profiler_warmup, active=config.profiler_active
        ),
        on_trace_ready=write,
        record_shapes=True,
    ) as profiler:
        yield profiler.step


@contextmanager
def memory_snapshots(
    config: Profiling, dump_folder: str, rank: int, first_step: int, device_type: str
) -> Iterator[StepDone]:
    """Write the history of GPU allocations each profile_freq steps, and when memory runs out.

    On a CPU there is no such history: a warning, then nothing. ``first_step`` as in `step_traces`.
    """
    if not config.enable_memory_snapshot:
        yield _nothing
        return
    if device_type != "cuda":
        logger.warning("profiling.enable_memory_snapshot has no effect: no GPU is used")
        yield _nothing
        return
    folder = Path(dump_folder) / config.save_memory_snapshot_folder
    step = first_step

    def write(name: str) -> None:
        path = _file(folder, name, f"rank{rank}_memory_snapshot.pickle")
        torch.cuda.memory._dump_snapshot(str(path))
        logger.info(f"Wrote the memory snapshot {path}")

    def step_done() -> None:
        nonlocal step
        if step % config.profile_freq == 0:
            write(f"iteration_{step}")
        step += 1

    # Stacks of allocations alone. With those of frees a checkpointed run ended in "returned NULL without
    # setting an exception" (torch 2.11), probably because recomputation ends by an exception, and tensors are
    # freed while it passes.
    torch.cuda.memory._record_memory_history(context="alloc", max_entries=_MEMORY_EVENTS)
    try:
        yield step_done
    except torch.OutOfMemoryError:
        write(f"iteration_{step}_exit")
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _file(folder: Path, iteration: str, name: str) -> Path:
    (folder / iteration).mkdir(parents=True, exist_ok=True)
    return folder / iteration / name
