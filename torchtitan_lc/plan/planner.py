"""Adds up what the parts of a job answer: bytes at each moment of a step, on GPU and host, and seconds."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_lc.components.metrics import flops_per_token
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.memory.placement import Sizes, host_bytes_needed
from torchtitan_lc.plan.activations import Activations
from torchtitan_lc.plan.hardware import GIB, Cluster
from torchtitan_lc.plan.job import Job, PlannedModel, make_job, parameters
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
    args = model.args
    n = parameters(model.module)
    table = 0 if args.tie_embeddings else args.vocab_size * args.dim
    return Plan(
        job=job,
        moments=tuple(_moments(job, activations, state)),
        reserve=_reserve(job),
        host=_host(job, state),
        time=Timer(job, activations, state).step(),
        flops=flops_per_token(
            n - table, args.n_layers, args.n_heads, args.head_dim, config.training.seq_len
        ),
        n_parameters=n,
    )


def _moments(job: Job, activations: Activations, state: Sharded) -> list[Moment]:
    shards = state.between_steps()
    angles = job.model.args.head_dim // 2 * max(4, job.itemsize)
    tokens = job.rows * job.tokens
    # Ids, positions and labels; angles of the rotary embedding, made once for all layers.
    always = {**shards, "batch": 24 * tokens, "rope angles": angles * tokens}
    saved = [_saved(job, index) for index in range(len(job.layers))]
    before = [_total(saved[:index]) for index in range(len(saved) + 1)]
    hidden = job.hidden
    loss_forward, loss_backward = activations.loss_costs
    gathered, forward, mlp, attention, reduced = [], [], [], [], []
    for index, layer in enumerate(job.layers):
        unit = index + 1
        block = activations.block(layer, _ahead(job, index))
        again = _segment(job, index)
        at = f"of layer {index + 1}"
        forward.append(
            moment(f"forward {at}", always, before[index], state.in_forward(unit), block.forward)
        )
        mine = {"block inputs": hidden}
        gathered.append(
            moment(
                f"gathering the weights {at}", always, before[index], state.gathering(unit), mine
            )
        )
        held = (always, before[index], again, state.in_backward(unit))
        mlp.append(moment(f"backward {at}, MLP half", *held, block.mlp_backward))
        attention.append(moment(f"backward {at}, attention half", *held, block.attention_backward))
        done = {"gradient of the block's output": hidden, "fetched ahead": _ahead(job, index)}
        reduced.append(
            moment(
                f"reducing the gradients {at}",
                always,
                before[index],
                again,
                state.after_backward(unit),
                done,
            )
        )
    head = len(job.layers) + 1
    everything = before[-1]
    dx = {"gradient of the hidden state": hidden}
    vocabulary = state.units[0].padded(1) * job.itemsize
    embedding = {"weight gradients": vocabulary, "gradient of the block's output": hidden}

    def fullest(moments: list[Moment]) -> Moment:
        return max(moments, key=lambda m: m.total)

    return [
        fullest(gathered),
        fullest(forward),
        moment(
            "loss",
            always,
            everything,
            state.in_forward(head),
            dx,
            {"final hidden state": hidden, "loss tile and head gradients": loss_forward.peak},
        ),
        moment(
            "backward of the loss",
            always,
            everything,
            state.in_backward(head),
            {"gradient of the hidden state": 2 * hidden},
            {"loss tile and head gradients": loss_backward.peak},
        ),
        moment(
            "reducing the gradients of the head",
            always,
            everything,
            state.after_backward(head),
            dx,
        ),
        fullest(mlp),
        fullest(attention),
        fullest(reduced),
        moment("backward of the embedding", always, state.in_backward(0), embedding),
        moment("reducing the gradients of the embedding", always, state.after_backward(0)),
        moment("optimizer", shards, state.in_optimizer()),
    ]


def _saved(job: Job, index: int) -> dict[str, int]:
    """What a layer keeps on the GPU from its forward until its backward."""
    layer = job.layers[index]
    outputs = layer.mode != "full" and not (layer.outputs_on_host and layer.mode == "selective")
    on_gpu = layer.keeps_input and not layer.input_on_host
    return {
        "block inputs": job.hidden if on_gpu or layer.mode == "none" else 0,
        "attention outputs": job.outputs if outputs else 0,
        "h1": job.hidden if layer.mode == "none" else 0,
    }


def _total(parts: list[dict[str, int]]) -> dict[str, int]:
    names = ("block inputs", "attention outputs", "h1")
    return {name: sum(part[name] for part in parts) for name in names}


def _ahead(job: Job, index: int) -> int:
    """Bytes that the backward of a layer fetches for the one before it."""
    if index == 0:
        return 0
    layer = job.layers[index - 1]
    size = job.hidden if layer.input_on_host else 0
    if job.early_fetch and layer.outputs_on_host and layer.mode == "selective":
        size += job.outputs
    return size


def _segment(job: Job, index: int) -> dict[str, int]:
    """Inputs that were made again for the layers of the segment before this one, and what they were made
    from."""
    start = max(i for i in range(index + 1) if job.layers[i].keeps_input)
    fetched = job.layers[start].input_on_host and start < index
    return {"block inputs": job.hidden * (max(0, index - start - 1) + fetched)}


def _reserve(job: Job) -> Moment:
    hw = job.cluster.hardware
    # Of the job, of the shards, of their replicas, of those who exchange heads and of the ring.
    groups = [job.world, job.shard, job.dp // max(1, job.shard // job.cp), job.ulysses, job.ring]
    communicators = sum(ranks > 1 for ranks in groups)
    return moment(
        "beside tensors",
        {
            "CUDA context": int(hw.context_gib * GIB),
            "NCCL": int(communicators * hw.communicator_gib * GIB),
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
