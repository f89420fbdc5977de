"""What a GPU and its node can hold and do. Every figure says where it comes from.

(m) measured for this project, (s) published specification, (d) derived: measured on H200, scaled by the
ratio of the specified bf16 rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch

from torchtitan_lc.config.job_config import Plan as PlanConfig
from torchtitan_lc.tools.errors import UserError

GIB = 2**30

# Tokens of a row -> TFLOP/s of (forward, backward), causal, D = 128, bf16: measured on H200, see
# docs/design.md; those of 128K are what calls of one head took inside a block. Between two lengths the rate is
# interpolated over the logarithm of the length.
Rates = dict[int, tuple[float, float]]
_H200_KERNELS: dict[str, Rates] = {
    "fa4": {
        2**16: (718, 673),
        2**17: (655, 622),
        2**18: (661, 627),
        2**20: (691, 633),
        2**22: (661, 630),
    },
    # FlashAttention-3 has not been run here: its authors' figures for Hopper are close to cuDNN's.
    "fa3": {2**16: (643, 607), 2**18: (600, 580), 2**20: (600, 560)},
    "cudnn": {2**16: (643, 607), 2**18: (508, 543), 2**20: (465, 535), 2**22: (457, 534)},
    "sdpa": {2**16: (332, 318), 2**18: (306, 325), 2**20: (302, 326), 2**22: (299, 313)},
    "fa2": {2**16: (332, 318), 2**18: (306, 325), 2**20: (302, 326), 2**22: (299, 313)},
}
# (d) of those rates is left for heads below 128: softmax is done per score, not per D
SMALL_HEADS = 0.75
# (m) Of large products inside a step; an 8192-cube alone 657 to 686 for seconds.
_H200_MATRIX = 620e12


@dataclass(frozen=True)
class Hardware:
    """One kind of node.

    memory_gib: of a GPU, as torch reports it. host_memory_gib: of a node. peak_flops: dense bf16, what
    MFU is measured against. matrix_flops: what a large product reaches. kernels: attention rates in
    TFLOP/s; order is preference. memory_gbs: of the GPU. link_gbs: what a GPU sends to the others of
    its node in an all-to-all; network_gbs: to other nodes. pcie_gbs: to the host, each way.
    host_optimizer_gbs: what the CPU's optimizer reads and writes, per node.
    launch_us: by which each operation of a tile takes longer than its bytes or FLOP, in microseconds: its
    launch, and a GPU that is not full at its beginning and end.
    exchange_us: by which an all-to-all takes longer than its bytes, in microseconds.
    context_gib: CUDA context and libraries. communicator_gib: of NCCL, each. allocator: share of what is
    allocated that the caching allocator holds beside it. host_process_gib: host memory of a rank's process.
    """

    name: str
    source: str
    memory_gib: float
    host_memory_gib: float
    peak_flops: float
    matrix_flops: float
    kernels: dict[str, Rates]
    memory_gbs: float
    link_gbs: float
    network_gbs: float
    pcie_gbs: float
    host_optimizer_gbs: float = 100.0
    launch_us: float = 2.9
    exchange_us: float = 110.0
    context_gib: float = 0.6
    communicator_gib: float = 0.3
    allocator: float = 0.02
    host_process_gib: float = 6.0

    def best_kernel(self, dtype: torch.dtype) -> str:
        """What attention.kernel "auto" would be, with its package installed."""
        half = dtype in (torch.bfloat16, torch.float16)
        return next(iter(self.kernels)) if half or self.name == "cpu" else "math"

    def attention_flops(self, kernel: str, seq_len: int, head_dim: int) -> tuple[float, float]:
        """FLOP/s of (forward, backward). Raises UserError for a kernel without figures here."""
        if kernel == "math":
            return (self.matrix_flops / 20, self.matrix_flops / 20)
        rates = self.kernels.get(kernel)
        if rates is None:
            raise UserError(
                f"attention.kernel = {kernel!r}: there is no rate of it for {self.name}; known are "
                f"{', '.join(self.kernels)}"
            )
        forward, backward = _between(rates, seq_len)
        share = 1.0 if head_dim >= 128 else SMALL_HEADS
        return 1e12 * forward * share, 1e12 * backward * share

    def offload_bytes_per_gpu(self, gpus_per_node: int, state: int) -> float:
        """What a rank may take of host memory for activations: nine tenths of what its process and its
        ``state`` (bytes) leave."""
        free = (self.host_memory_gib / gpus_per_node - self.host_process_gib) * GIB - state
        return max(free, 0.0) * 0.9


@dataclass(frozen=True)
class Cluster:
    hardware: Hardware
    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


def _between(rates: Rates, seq_len: int) -> tuple[float, float]:
    lengths = sorted(rates)
    if seq_len <= lengths[0]:
        return rates[lengths[0]]
    for low, high in zip(lengths, lengths[1:], strict=False):
        if seq_len <= high:
            share = math.log(seq_len / low) / math.log(high / low)
            a, b = rates[low], rates[high]
            return (a[0] + share * (b[0] - a[0]), a[1] + share * (b[1] - a[1]))
    return rates[lengths[-1]]


def _scaled(kernels: dict[str, Rates], factor: float, names: tuple[str, ...]) -> dict[str, Rates]:
    return {
        name: {n: (f * factor, b * factor) for n, (f, b) in kernels[name].items()} for name in names
    }


_HOPPER = ("fa4", "fa3", "cudnn", "sdpa", "fa2")
_BLACKWELL = ("fa4", "cudnn", "sdpa", "fa2")

TABLE = {
    "h200_141gb": Hardware(
        name="h200_141gb",
        source="(m) kernels, matrices, launches, NVLink between two, PCIe; (s) the rest, 400 Gbit/s network",
        memory_gib=139.8,
        host_memory_gib=2048,
        peak_flops=989e12,
        matrix_flops=_H200_MATRIX,
        kernels=_H200_KERNELS,
        memory_gbs=4800,
        link_gbs=325,
        network_gbs=45,
        pcie_gbs=55,
    ),
    "h100_80gb": Hardware(
        name="h100_80gb",
        source="(d) the chip of an H200 with less and slower memory: 3,350 GB/s (s)",
        memory_gib=79.1,
        host_memory_gib=2048,
        peak_flops=989e12,
        matrix_flops=_H200_MATRIX,
        kernels=_H200_KERNELS,
        memory_gbs=3350,
        link_gbs=325,
        network_gbs=45,
        pcie_gbs=55,
    ),
    "a100_80gb": Hardware(
        name="a100_80gb",
        source="(d) 312 TFLOP/s, 2,039 GB/s, NVLink 3, PCIe 4 (s); FlashAttention-2 at 0.6 of the peak",
        memory_gib=79.2,
        host_memory_gib=2048,
        peak_flops=312e12,
        matrix_flops=195e12,
        kernels={name: {2**20: (190, 180)} for name in ("sdpa", "cudnn", "fa2")},
        memory_gbs=2039,
        link_gbs=210,
        network_gbs=22,
        pcie_gbs=24,
    ),
    "b200_192gb": Hardware(
        name="b200_192gb",
        source="(d) H200 x 2250 / 989; 8,000 GB/s, NVLink 5, 178 GiB usable (s)",
        memory_gib=178.0,
        host_memory_gib=3072,
        peak_flops=2250e12,
        matrix_flops=_H200_MATRIX * 2250 / 989,
        kernels=_scaled(_H200_KERNELS, 2250 / 989, _BLACKWELL),
        memory_gbs=8000,
        link_gbs=650,
        network_gbs=45,
        pcie_gbs=55,
    ),
    "b300_288gb": Hardware(
        name="b300_288gb",
        source="(d) H200 x 2250 / 989; 8,000 GB/s, NVLink 5, 268 GiB usable (s)",
        memory_gib=268.0,
        host_memory_gib=3072,
        peak_flops=2250e12,
        matrix_flops=_H200_MATRIX * 2250 / 989,
        kernels=_scaled(_H200_KERNELS, 2250 / 989, _BLACKWELL),
        memory_gbs=8000,
        link_gbs=650,
        network_gbs=90,
        pcie_gbs=110,
    ),
    "cpu": Hardware(
        name="cpu",
        source="(d) a process on one core of a laptop, roughly",
        memory_gib=4,
        host_memory_gib=16,
        peak_flops=1e11,
        matrix_flops=5e10,
        kernels={"cpu": {2**11: (0.02, 0.02)}},
        memory_gbs=10,
        link_gbs=1,
        network_gbs=0.1,
        pcie_gbs=10,
        context_gib=0.25,
        communicator_gib=0.0,
    ),
}


def make_cluster(config: PlanConfig) -> Cluster:
    """Raises UserError for figures that are missing or no positive numbers."""
    if min(config.nodes, config.gpus_per_node) < 1:
        raise UserError(
            f"plan.nodes = {config.nodes}, plan.gpus_per_node = {config.gpus_per_node}: each must be at "
            "least 1"
        )
    machine = config.machine
    given = {f.name: getattr(machine, f.name) for f in fields(machine)}
    wrong = {name: value for name, value in given.items() if value is not None and not value > 0}
    if wrong:
        shown = ", ".join(f"plan.machine.{name} = {value}" for name, value in wrong.items())
        raise UserError(f"{shown}: must be above 0")
    if config.hardware == "custom":
        missing = [f"plan.machine.{name}" for name, value in given.items() if value is None]
        if missing:
            raise UserError(f'plan.hardware = "custom" needs {", ".join(missing)}')
    return Cluster(_with_figures(config.hardware, given), config.nodes, config.gpus_per_node)


def _with_figures(name: str, given: dict[str, float | None]) -> Hardware:
    base = TABLE["h200_141gb" if name == "custom" else name]
    values = {key: value for key, value in given.items() if value is not None}
    if not values:
        return base
    changes: dict[str, object] = {}
    for key in ("peak", "matrix"):
        if f"{key}_tflops" in values:
            changes[f"{key}_flops"] = values.pop(f"{key}_tflops") * 1e12
    rates = [values.pop(f"attention_{way}_tflops", None) for way in ("forward", "backward")]
    if any(rates):
        changes["kernels"] = {
            kernel: {n: (rates[0] or f, rates[1] or b) for n, (f, b) in table.items()}
            for kernel, table in base.kernels.items()
        }
    said = ", ".join(key for key, value in given.items() if value is not None)
    source = (
        "all from [plan.machine]" if name == "custom" else f"{base.source}; [plan.machine]: {said}"
    )
    return replace(base, name=name, source=source, **changes, **values)  # type: ignore[arg-type]
