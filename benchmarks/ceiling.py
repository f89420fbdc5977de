"""The time that kernels and matrix products of a block take alone: what its step time is measured against.

    ceiling = each kernel call of a step, timed alone at its exact shape
            + matrix products of the block, in FLOP, over the rate of one large bf16 product

Both are measured in the same run as the step, after WARM seconds of the same call: a step lasts for
seconds, and what a GPU does in its first milliseconds after a pause (the "burst", recorded too) it cannot
keep up at its power limit. Matrix products are those that mathematics and the
checkpoint mode need: 2 N T forward, 4 N T backward and, where the block is recomputed, 2 (N - w2) T more
(N parameters, T tokens of the rank; nobody reads the output of a recomputed MLP). What a schedule computes
beyond that counts against it. Neither is a bound: products beside other work may run at other clocks. It is a
reference that is the same for all schedules with the same kernel calls.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import Record
from benchmarks.shapes import Call
from benchmarks.timing import GIB, seconds_of, warm_up
from torchtitan_lc.attention.kernels import Kernel
from torchtitan_lc.models.decoder.args import DecoderArgs

WARM = 1.0


@dataclass(frozen=True)
class Times:
    """Seconds of calls: of the first ones after a pause, and of those after WARM seconds."""

    burst: list[float]
    steady: list[float]


def times_of(fn: Callable[[], Any], device: torch.device, repeats: int, warmup: int = 1) -> Times:
    burst = seconds_of(fn, device, repeats, warmup)
    if device.type != "cuda":
        return Times(burst, burst)
    warm_up(fn, device, WARM)
    return Times(burst, seconds_of(fn, device, repeats, warmup=0))


def block_parameters(args: DecoderArgs) -> int:
    """Parameters of a block's matrices."""
    heads = 2 * (args.n_heads + args.n_kv_heads) * args.head_dim
    return args.dim * (heads + 3 * args.hidden_dim)


def matmul_flops(args: DecoderArgs, tokens: int, mode: str) -> float:
    """Of all blocks, forward and backward, of ``tokens`` tokens of a rank."""
    parameters = 6.0 * block_parameters(args)
    if mode != "none":
        parameters += 2.0 * (block_parameters(args) - args.dim * args.hidden_dim)
    return parameters * tokens * args.n_layers


def matmul_times(size: int, dtype: torch.dtype, device: torch.device, repeats: int = 20) -> Times:
    """Of a size-cubed product of random numbers (zeros would be faster)."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return times_of(lambda: torch.mm(a, b, out=out), device, repeats, warmup=5)


def call_bytes(call: Call, kernel: str, itemsize: int) -> int:
    """What timing ``call`` holds at once, for a guard: q, k, v, out, their gradients and fp32 dq."""
    q = call.queries * call.heads * call.head_dim
    kv = call.keys * call.kv_heads * call.head_dim
    held = (4 * q + 4 * kv) * itemsize + 4 * q
    if kernel == "math":
        held += 6 * 4 * call.heads * call.queries * call.keys
    return held


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo does not say what is available")


def time_call(
    kernel: Kernel, call: Call, dtype: torch.dtype, device: torch.device, repeats: int
) -> Times:
    """Of ``repeats`` calls. Raises ValueError where there is too little memory for one."""
    need, free = call_bytes(call, kernel.name, dtype.itemsize), free_bytes(device)
    if need > 0.9 * free:
        raise ValueError(f"needs about {need / GIB:.1f} GiB, {free / GIB:.1f} GiB are free")

    def random(tokens: int, heads: int) -> Tensor:
        return torch.randn(1, tokens, heads, call.head_dim, device=device, dtype=dtype)

    q, k = random(call.queries, call.heads), random(call.keys, call.kv_heads)
    v = random(call.keys, call.kv_heads)
    mask: Any = {"causal": call.causal, "scale": 1 / math.sqrt(call.head_dim)}
    if call.direction == "forward":
        return times_of(lambda: kernel.forward(q, k, v, **mask), device, repeats)
    out, lse = kernel.forward(q, k, v, **mask)
    dout = random(call.queries, call.heads)
    return times_of(lambda: kernel.backward(dout, q, k, v, out, lse, **mask), device, repeats)


class Ceiling:
    """Times each kind of kernel call once, and says what a step of such calls could take."""

    def __init__(
        self, args: DecoderArgs, dtype: torch.dtype, device: torch.device, matmul_size: int
    ) -> None:
        self.args, self.dtype, self.device = args, dtype, device
        matmul = matmul_times(matmul_size, dtype, device)
        flops = 2.0 * matmul_size**3
        self.rate, self.burst_rate = flops / median(matmul.steady), flops / median(matmul.burst)
        self._times: dict[tuple[str, Call], Times] = {}

    def of(self, kernel: Kernel, calls: Counter[Call], tokens: int, mode: str) -> Record:
        """Seconds of a step of all blocks, which made ``calls``: attention_s, matmul_s and both together,
        and those of bursts."""
        for call in calls:
            if (kernel.name, call) not in self._times:
                self._times[kernel.name, call] = time_call(kernel, call, self.dtype, self.device, 3)
        times = [(n, self._times[kernel.name, call]) for call, n in calls.items()]
        attention = sum(n * median(t.steady) for n, t in times)
        flops = matmul_flops(self.args, tokens, mode)
        burst = sum(n * median(t.burst) for n, t in times) + flops / self.burst_rate
        return {
            "attention_s": attention,
            "matmul_s": flops / self.rate,
            "seconds": attention + flops / self.rate,
            "burst_seconds": burst,
            "kernel_calls": sum(calls.values()),
            "attention_tflops": sum(n * c.flops for c, n in calls.items()) / attention / 1e12,
        }
