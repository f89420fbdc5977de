"""Run one function on several gloo processes of this machine, and hand back what each returned.

Workers come from a forkserver that has torch preloaded, so four ranks start in a fraction of a second;
each test gets fresh processes, so no process group, seed or mesh leaks from one test into the next.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

_PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",
    "torch.utils.checkpoint",
    "torch.optim.adamw",
]


def _worker(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    backend: str,
    results: Any,
    args: tuple,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = str(world_size)
    try:
        if "nccl" in backend:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=world_size
        )
        value = fn(rank, world_size, *args)
        # Pickled here: a queue would hand tensors over as memory shared with a process that ends.
        results.put((rank, True, pickle.dumps(value)))
        dist.barrier()  # nobody tears the store down while a peer still talks
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        raise SystemExit(1) from None


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    backend: str = "gloo",
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on ``world_size`` processes, on gloo unless ``backend``
    says "cpu:gloo,cuda:nccl", where rank r gets GPU r.

    ``fn`` must be a module-level function; arguments and results must pickle (return plain CPU
    tensors, not DTensors). Raises AssertionError with the traceback of the first rank that failed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        workers = [
            context.Process(target=_worker, args=(fn, r, world_size, store, backend, results, args))
            for r in range(world_size)
        ]
        for worker in workers:
            worker.start()
        answered = False
        try:
            values = _collect(workers, results, world_size, timeout)
            answered = True
            return values
        finally:
            for worker in workers:
                # After a failure the others may wait for the failed one for ever.
                worker.join(timeout=10 if answered else 0)
                if worker.is_alive():
                    worker.kill()
                    worker.join()


def _collect(workers: list[Any], results: Any, world_size: int, timeout: float) -> list[Any]:
    values: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(values) < world_size:
        try:
            rank, ok, value = results.get(timeout=0.2)
        except queue.Empty:
            dead = [w.exitcode for w in workers if w.exitcode not in (None, 0)]
            if dead:
                raise AssertionError(f"a worker died without a word: exit codes {dead}") from None
            if time.monotonic() > deadline:
                missing = sorted(set(range(world_size)) - set(values))
                raise AssertionError(f"no answer from ranks {missing} in {timeout} s") from None
            continue
        if not ok:
            raise AssertionError(f"rank {rank} failed:\n{value}")
        values[rank] = pickle.loads(value)
    return [values[r] for r in range(world_size)]
