"""Optimizer state and parameters in host memory, on GPUs: the same bits, and what each memory holds."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.test_optimizer_offload import OFFLOADS, SETTINGS, assert_same, train
from tests.helpers import run_distributed
from tests.tiny import register_tiny
from torchtitan_lc.components.offloaded_adam import OffloadedAdam, StreamLanes
from torchtitan_lc.components.optimizer import build_optimizer
from torchtitan_lc.config.job_config import Optimizer

pytestmark = pytest.mark.gpu

NCCL = "cpu:gloo,cuda:nccl"
MIB = 1024**2


def _parameters(dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    """Large ones, so that copies take their time, among small, odd and empty ones."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [
        (2048, 4096),
        (7,),
        (4096, 4096),
        (0, 5),
        (33, 65),
        (4096, 2048),
        (4096,),
        (1024, 4096),
    ]
    return [
        (str(i), nn.Parameter(torch.randn(s, generator=generator, device="cuda").to(dtype)))
        for i, s in enumerate(shapes)
    ]


def _optimizer(parameters: list[tuple[str, nn.Parameter]], **fields: Any) -> torch.optim.Optimizer:
    return build_optimizer(parameters, dataclasses.replace(Optimizer(lr=0.05), **fields))


def _trained(
    steps: int, dtype: torch.dtype, hold_up: Callable[[torch.optim.Optimizer], None], **fields: Any
) -> list[torch.Tensor]:
    """Parameters, then moments and counts, after ``steps``."""
    parameters = _parameters(dtype)
    optimizer = _optimizer(parameters, **fields)
    hold_up(optimizer)
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(steps):
        # Made on the current stream right before the step, which may not pass them.
        for _, p in parameters:
            p.grad = torch.randn(p.shape, generator=generator, device="cuda").to(dtype)
        optimizer.step()
        optimizer.zero_grad()
    state = [optimizer.state[p] for _, p in parameters]
    values = [s[key] for s in state for key in ("exp_avg", "exp_avg_sq", "step")]
    return [x.detach().cpu() for x in [p for _, p in parameters] + values]


def _nothing(optimizer: torch.optim.Optimizer) -> None:
    return None


def _slow_lane(name: str) -> Callable[[torch.optim.Optimizer], None]:
    """Makes each piece of work of one lane begin about a millisecond late: a missing event shows."""

    def hold_up(optimizer: torch.optim.Optimizer) -> None:
        assert isinstance(optimizer, OffloadedAdam)
        lanes = StreamLanes(torch.device("cuda"))
        lane = getattr(lanes, name)
        submit = lane.submit

        def late(work: Callable[[], Any]) -> None:
            submit(lambda: (torch.cuda._sleep(2_000_000), work()))

        lane.submit = late
        optimizer._lanes = lanes

    return hold_up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_three_steps_give_the_bits_of_the_plain_optimizer(name: str, dtype: torch.dtype) -> None:
    plain = _trained(3, dtype, _nothing, name=name)
    for hold_up in (_nothing, _slow_lane("upload"), _slow_lane("download")):
        ours = _trained(3, dtype, hold_up, name=name, offload_state=True)
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_the_bits_are_the_same_on_a_stream_of_the_callers_own() -> None:
    plain = _trained(3, torch.float32, _nothing)
    with torch.cuda.stream(torch.cuda.Stream()):
        ours = _trained(3, torch.float32, _slow_lane("upload"), offload_state=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_the_gpu_holds_the_moments_of_two_parameters_and_only_in_the_step() -> None:
    parameters = _parameters()
    largest = max(p.nbytes for _, p in parameters)
    optimizer = _optimizer(parameters, offload_state=True)
    for _, p in parameters:
        p.grad = torch.ones_like(p)
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        assert torch.cuda.max_memory_allocated() - before <= 4 * largest + MIB
        assert torch.cuda.memory_allocated() - before <= MIB
    saved = optimizer.state_dict()
    torch.cuda.reset_peak_memory_stats()
    optimizer.load_state_dict(saved)
    assert torch.cuda.max_memory_allocated() - before <= MIB
    moments = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert all(x.device.type == "cpu" and (x.is_pinned() or x.numel() == 0) for x in moments)


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def test_pinned_memory_is_not_rounded_up_and_is_given_back() -> None:
    moments = 1280 * MIB  # a power of two above it is 2 GiB
    parameter = nn.Parameter(torch.zeros(moments // 2 // 4, device="cuda"))
    _optimizer([("small", nn.Parameter(torch.zeros(8, device="cuda")))], offload_state=True)
    for _ in range(2):
        gc.collect()
        before = _resident()
        optimizer = _optimizer([("large", parameter)], offload_state=True)
        assert optimizer.state[parameter]["exp_avg_sq"].is_pinned()
        assert _resident() - before < 1.1 * moments
        del optimizer
    gc.collect()
    assert _resident() - before < 0.1 * moments


def _jobs(rank: int, world_size: int, tmp: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    register_tiny()
    device = f"cuda:{rank}"
    base = {"optimizer.name": "AdamW", "attention.kernel": "math", "debug.deterministic": True}
    replicas = {"parallelism.data_parallel_replicate_degree": world_size, "model.flavor": "tied"}
    for spread in ({"parallelism.context_parallel_degree": world_size}, replicas):
        plain = train(tmp, 3, device, {**base, **spread})
        assert_same(plain, train(tmp, 3, device, {**base, **spread, **OFFLOADS["state"]}), spread)
        # The CPU's AdamW rounds otherwise than the GPU's.
        offloaded = train(tmp, 3, device, {**base, **spread, **OFFLOADS["all"]})
        for a, b in zip(plain["seen"], offloaded["seen"], strict=True):
            assert a == pytest.approx(b, rel=1e-5), spread
        for name, value in plain["end"].items():
            torch.testing.assert_close(value, offloaded["end"][name], rtol=1e-3, atol=1e-5)
    for offload, async_mode in (("state", "async"), ("all", "async"), ("all", "disabled")):
        settings = {**base, **OFFLOADS[offload]}
        straight = train(tmp, 6, device, settings)
        saving = {**settings, "checkpoint.enable": True, "checkpoint.async_mode": async_mode}
        folder = f"{tmp}/{offload}-{async_mode}"
        train(folder, 3, device, saving)
        assert_same(straight, train(folder, 6, device, saving), (offload, async_mode), last=3)


def test_jobs_over_nccl_train_alike_and_resume(tmp_path: Path) -> None:
    assert SETTINGS["training.max_norm"] == 0.5  # clipped, so norms of host gradients count
    world_size = 2 if torch.cuda.device_count() >= 2 else 1
    run_distributed(_jobs, world_size, str(tmp_path), timeout=280, backend=NCCL)
