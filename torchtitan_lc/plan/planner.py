"""Adds up what the parts of a job answer: bytes at each moment of a step, on GPU and host, and seconds."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_lc.components.metrics import flops_per_token
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.memory.placement import Sizes, host_bytes_needed
from torchtitan_lc.plan.activations import Activations
from torchtitan_lc.plan.hardware import GIB, Cluster
from torchtitan_lc.plan.job import Job, PlannedModel, make_job, parameters
from torchtitan_lc.plan.moments import planned_moments
from torchtitan_lc.plan.state import Sharded
from torchtitan_lc.plan.terms import Moment, moment
from torchtitan_lc.plan.timing import StepTime, Timer


@dataclass(frozen=True)
class Plan:
    """moments: of a GPU, what tensors hold, in the order of the step, each kind at its fullest layer.
    reserve: what the GPU holds beside tensors. host: of one node."""

    job: Job
    moments: tuple[Moment, ...]
    reserve: Moment
    host: Moment
    time: StepTime
    flops: tuple[float, float]
    n_parameters: int

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda m: m.total)

    @property
    def gpu_bytes(self) -> int:
        return self.peak.total + self.reserve.total

    @property
    def gpu_room(self) -> int:
        """Bytes left on the GPU; negative: by how much it does not fit."""
        return int(self.job.cluster.hardware.memory_gib * GIB) - self.gpu_bytes

    @property
    def host_room(self) -> int:
        return int(self.job.cluster.hardware.host_memory_gib * GIB) - self.host.total

    @property
    def fits(self) -> bool:
        return self.gpu_room >= 0 and self.host_room >= 0

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        config = self.job.config
        tokens = self.job.rows * self.job.accumulation * config.training.seq_len
        return tokens / self.time.seconds / self.job.cp

    def mfu(self, causal: bool) -> float:
        """Per cent of the peak, as components/metrics.py logs it."""
        flops = self.flops[1 if causal else 0] * self.tokens_per_second
        return 100 * flops / self.job.cluster.hardware.peak_flops

    @property
    def hours(self) -> float:
        return self.job.config.training.steps * self.time.seconds / 3600

    @property
    def checkpoint_bytes(self) -> int:
        state = Sharded(self.job)
        return self.n_parameters * state.master * (1 + state.moments)


def make_plan(config: JobConfig, model: PlannedModel, cluster: Cluster) -> Plan:
    """Raises UserError where the config cannot run on the cluster at all."""
    job = make_job(config, model, cluster)
    activations, state = Activations(job), Sharded(job)
    moments = tuple(planned_moments(job, activations, state))
    args = model.args
    n = parameters(model.module)
    table = 0 if args.tie_embeddings else args.vocab_size * args.dim
    return Plan(
        job=job,
        moments=moments,
        reserve=_reserve(job, max(m.total for m in moments)),
        host=_host(job, state),
        time=Timer(job, activations, state).step(),
        flops=flops_per_token(
            n - table, args.n_layers, args.n_heads, args.head_dim, config.training.seq_len
        ),
        n_parameters=n,
    )


def _reserve(job: Job, allocated: int) -> Moment:
    hw = job.cluster.hardware
    # Of the job, of the shards, of their replicas, of those who exchange heads and of the ring.
    groups = [job.world, job.shard, job.dp // max(1, job.shard // job.cp), job.ulysses, job.ring]
    communicators = sum(ranks > 1 for ranks in groups)
    return moment(
        "beside tensors",
        {
            "CUDA context": int(hw.context_gib * GIB),
            "NCCL": int(communicators * hw.communicator_gib * GIB),
            "allocator reserve": int(hw.allocator * allocated),
        },
    )


def _host(job: Job, state: Sharded) -> Moment:
    per_gpu = {
        "processes": int(job.cluster.hardware.host_process_gib * GIB),
        "offloaded activations": host_bytes_needed(job.layers, Sizes(job.hidden, job.outputs)),
        **state.host(),
    }
    if job.config.checkpoint.enable and job.config.checkpoint.async_mode == "async":
        per_gpu["checkpoint copy"] = (1 + state.moments) * state.shard_bytes
    node = job.cluster.gpus_per_node
    return moment("of one node", {name: size * node for name, size in per_gpu.items()})
