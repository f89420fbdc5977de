"""Start and end of the process groups, their timeouts, and determinism."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def init_distributed(
    device_type: str, timeout_seconds: int, trace_buffer_size: int
) -> torch.device:
    """Join the job that the launcher's environment describes; returns this rank's device.

    Without a launcher (no RANK in the environment) the job is this one process.
    CUDA jobs get a gloo group beside NCCL: counts of labels, asynchronous checkpoints, and the norm of
    gradients that live on the host (training.enable_cpu_offload) are reduced there.
    """
    for key, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }.items():
        os.environ.setdefault(key, value)
    # NCCL's flight recorder keeps the last collectives for the dump that a timeout writes.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(trace_buffer_size))
    # FSDP2's collectives run beside attention kernels: with normal priority they would wait until the last of
    # a kernel's thread blocks has started, and the peers' side would occupy multiprocessors meanwhile.
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if device_type == "cuda" else None,
    )
    return device


def set_timeouts(groups: list[dist.ProcessGroup], timeout_seconds: int) -> None:
    """Give every group of the job a new timeout; called between steps, by all ranks.

    Every rank must be done with the old timeout first, else a slow one is cut off by the new.
    """
    dist.barrier()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    timeout = timedelta(seconds=timeout_seconds)
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed torch's generators alike on all ranks; ``deterministic`` refuses kernels that are not.

    Initial weights do not depend on generators (init.py), and no layer draws random numbers.
    """
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        # cuBLAS is deterministic only with a fixed workspace, chosen before its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
