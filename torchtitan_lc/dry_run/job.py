"""What a dry run runs: the job as one process can run it, and the plan of exactly that."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from torchtitan_lc.attention.kernels import KernelChoice
from torchtitan_lc.attention.kernels.stand_in import StandIn
from torchtitan_lc.config.job_config import Checkpoint, JobConfig, Metrics, Profiling
from torchtitan_lc.dry_run.memory import shown
from torchtitan_lc.plan.hardware import GIB, Cluster, make_cluster
from torchtitan_lc.plan.job import Job, PlannedModel, planned_model
from torchtitan_lc.plan.planner import Plan, make_plan
from torchtitan_lc.plan.terms import Term
from torchtitan_lc.preflight import check_job, job_kernel
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.hardware import device_memory, device_name

# On a CPU a step of more than this has fake tensors: operations are called, nothing is computed.
_MOST_FLOPS, _MOST_BYTES = 1e12, 2 * GIB
_FAKE_SECONDS = 0.25  # of one layer and tile, forward and backward: measured on one core
_LONGEST = 3600
ALLOCATORS = (
    "allocator reserve"  # the term of Plan.reserve that lies within what the allocator holds
)


@dataclass(frozen=True)
class DryJob:
    """config: as the trainer gets it. fake: its tensors have no memory. limit: bytes that the allocator may
    take, or tensors where none is there. rate_known: of the kernel on the planned hardware. notes: how this
    differs from the job."""

    config: JobConfig
    plan: Plan
    device: torch.device
    kernel: KernelChoice
    fake: bool
    limit: int
    rate_known: bool
    notes: tuple[str, ...]

    @property
    def stands_in(self) -> bool:
        return isinstance(self.kernel.kernel, StandIn)

    @property
    def update_first(self) -> bool:
        """Of the first step only the update runs: the next one has all state anyway."""
        return self.stands_in or self.device.type != "cuda"


def alone(config: JobConfig) -> JobConfig:
    """A copy for one process whose peers are not there: no check over ranks, each row one document, nothing
    loaded, saved or written."""
    config = copy.deepcopy(config)
    config.attention.self_check = False
    config.training.isolate_documents = False
    config.checkpoint, config.metrics, config.profiling = Checkpoint(), Metrics(), Profiling()
    return config


def make_dry_job(config: JobConfig, device_type: str) -> DryJob:
    """Raises UserError for a job that cannot run, here or on its cluster."""
    on_gpu = device_type == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    model, cluster = planned_model(config), _cluster(config)
    stand_in = KernelChoice(StandIn(), "of the dry run: it computes nothing")
    own = alone(config)
    kernel, fake = stand_in, False
    if config.dry_run.kernel == "job" and on_gpu:
        kernel = _kernel(own, model, device_type)
    plan = _plan(config, model, cluster, kernel)
    if not on_gpu:
        _check_on_cpu(config)
        fake = _is_large(plan)
        if fake:
            _check_patience(plan)
        elif config.dry_run.kernel == "job":
            kernel = _kernel(own, model, device_type)
            plan = _plan(config, model, cluster, kernel)
    _decide(own, plan.job)
    if kernel is stand_in:
        own.attention.kernel = "auto"  # of the job's none is asked, so it need not be here
    shared = own.activation_offload.enable and (fake or config.dry_run.share_host_buffers)
    own.debug.share_offload_buffers = shared
    own.compile.enable = own.compile.enable and on_gpu
    check_job(own, cluster.gpus, device_type, ranks_per_node=cluster.gpus_per_node)
    limit, said = _limit(config, plan, device_type)
    notes = [
        f"Peers are not there: this is rank 0 of {cluster.gpus}. What arrives is a copy of what was sent, at "
        "once; losses and gradients mean nothing. NCCL's and the driver's memory is planned.",
        "Each row is one document; no self-check, nothing is loaded or saved.",
        said,
    ]
    if kernel is stand_in:
        notes.append("Attention is not computed: a stand-in allocates what flash kernels do.")
    if kernel is stand_in or not on_gpu:
        notes.append("Of the first step only the update runs.")
    if on_gpu:
        notes.append(
            f"Seconds are planned for {cluster.hardware.name} and measured on {device_name(device_type)}, "
            "without what peers take."
        )
    else:
        notes.append("On a CPU tensors are counted: no time.")
    if fake:
        notes.append("Tensors are fake: the job's own operations, without memory or arithmetic.")
    if shared:
        notes.append("Layers share their host buffers; what the job needs is counted all the same.")
    if config.compile.enable and not own.compile.enable:
        notes.append("Nothing is compiled on a CPU.")
    known = kernel is stand_in or kernel.kernel.name in cluster.hardware.kernels
    return DryJob(own, plan, device, kernel, fake, limit, known, tuple(notes))


def _cluster(config: JobConfig) -> Cluster:
    """That of [plan], its GPU with the memory that the dry run grants."""
    cluster = make_cluster(config.plan)
    memory = config.dry_run.memory_limit_gib
    if memory == "auto":
        return cluster
    hardware = dataclasses.replace(cluster.hardware, memory_gib=memory)
    return dataclasses.replace(cluster, hardware=hardware)


def _kernel(config: JobConfig, model: PlannedModel, device_type: str) -> KernelChoice:
    try:
        return job_kernel(config, model.args, device_type)
    except ValueError as error:
        raise UserError(f'{error}; dry_run.kernel = "stand_in" needs none') from error


def _plan(config: JobConfig, model: PlannedModel, cluster: Cluster, kernel: KernelChoice) -> Plan:
    """Of the kernel that runs, whether the hardware's table knows its rate or not."""
    name = kernel.kernel.name
    config = copy.deepcopy(config)
    config.attention.kernel = name  # type: ignore[assignment]  # a stand-in can be planned, not asked for
    rates = cluster.hardware.kernels
    hardware = dataclasses.replace(
        cluster.hardware, kernels={**rates, name: rates.get(name, next(iter(rates.values())))}
    )
    return make_plan(config, model, dataclasses.replace(cluster, hardware=hardware))


def _check_on_cpu(config: JobConfig) -> None:
    for key, value in (
        ("training.enable_cpu_offload", config.training.enable_cpu_offload),
        ("optimizer.offload_state", config.optimizer.offload_state),
    ):
        if value:
            raise UserError(
                f"{key} = true: without a GPU a dry run cannot tell its memory from the host's; use --plan, "
                "or a machine with a GPU"
            )


def _is_large(plan: Plan) -> bool:
    job = plan.job
    tokens = job.rows * job.accumulation * job.tokens
    return plan.flops[1] * tokens > _MOST_FLOPS or plan.peak.total > _MOST_BYTES


def _check_patience(plan: Plan) -> None:
    job, tiling = plan.job, plan.job.config.tiling
    tiles = max(job.tile(tiling.projection_tokens)[1], job.tile(tiling.mlp_tokens)[1])
    steps = job.config.dry_run.steps - 1
    seconds = _FAKE_SECONDS * len(job.layers) * tiles * job.accumulation * steps
    if seconds > _LONGEST:
        raise UserError(
            f"training.seq_len = {job.config.training.seq_len}: without a GPU the operations of "
            f"{steps} step(s), one by one, would take about {seconds / 3600:.1f} hours, though nothing is "
            "computed; use --plan, a machine with a GPU, or larger tiles ([tiling])"
        )


def _decide(config: JobConfig, job: Job) -> None:
    """ "auto" as the planned machine has it: this one may have more memory, or less."""
    config.parallelism.context_parallel_ulysses_degree = job.ulysses
    config.attention.hold_normed_input = job.hold_normed_input
    config.attention.sum_kv_gradients = job.sum_kv_gradients
    config.attention.overlap_exchange = job.overlap_exchange
    config.training.release_cached_memory = job.release_cached
    offload = config.activation_offload
    if offload.enable:
        offload.early_fetch = job.early_fetch
        if offload.host_memory_gib == "auto":
            offload.host_memory_gib = job.host_budget / GIB


def _names(terms: Iterable[Term]) -> str:
    return ", ".join(term.name for term in terms)


def _limit(config: JobConfig, plan: Plan, device_type: str) -> tuple[int, str]:
    """Bytes for the allocator, and how that is said."""
    memory, name = plan.job.cluster.hardware.memory_gib, plan.job.cluster.hardware.name
    if device_type == "cuda":
        here = device_memory(device_type) / GIB
        if config.dry_run.memory_limit_gib != "auto" and memory > here:
            raise UserError(
                f"dry_run.memory_limit_gib = {memory}: this GPU has {here:.1f} GiB; take a larger one, or a "
                "smaller limit"
            )
        if memory > here:
            memory, name = here, "this GPU"
    # What the allocator holds beside tensors is its own affair, where there is one.
    outside = [t for t in plan.reserve.terms if device_type != "cuda" or t.name != ALLOCATORS]
    beside = sum(term.size for term in outside)
    limit = int(memory * GIB) - beside
    if limit <= 0:
        raise UserError(
            f"dry_run.memory_limit_gib = {memory}: what is not tensors takes {shown(beside)} (planned: "
            f"{_names(outside)})"
        )
    if config.dry_run.memory_limit_gib != "auto":
        name = "dry_run.memory_limit_gib"
    return limit, (
        f"At most {shown(limit)}: the {memory:g} GiB of {name} less {shown(beside)} ({_names(outside)})."
    )
