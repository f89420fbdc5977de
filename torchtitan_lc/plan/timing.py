"""How long a step takes, part by part: work over rate, each counted from the code that does it.

    attention      FLOP of the causal triangle over the kernel's measured rate
    linear         FLOP of the model's own tile functions over the rate of matrix products
    element-wise   bytes that their other operations move over the bandwidth of the GPU's memory
    launches       a few microseconds for each operation of a tile; many, where stages are
    exchange       bytes sent over the link, with attention.overlap_exchange those that no projection hides;
                   and for each exchange some time that none hides
    ring           transfers that no kernel hides, and sums of partial results
    host           what it takes to start the work, as far as that is longer than the work
    the rest       only what does not fit beside the work that it runs beside

A rank that owns more heads than others sets the pace. Rows count as one document each: packed ones take less
time. torch.compile joins operations: fewer bytes and launches, by a measured factor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from torchtitan_lc.memory.placement import LayerPlacement
from torchtitan_lc.plan.activations import Activations
from torchtitan_lc.plan.job import Job
from torchtitan_lc.plan.state import Sharded
from torchtitan_lc.tools.meter import Cost

_BACKWARD = 2.5  # attention's backward in forwards: five matrix products for two
_OF_BANDWIDTH = 0.85  # (d) of the memory's bandwidth is reached by element-wise kernels
# (m) of element-wise time and launches is left by torch.compile: a block of 8B, 64K tokens of a rank, took
# 0.649 s and compiled 0.601 s, with 4 heads a stage 0.642 s and 0.588 s.
_COMPILED = 0.4
# (m) Seconds of the host, Python and dispatch, forward and backward: for a layer, for each of its stages, and
# for each operation of a tile, compiled or not. Fitted to host_8b_h200, which it meets within 15 % but for
# one compiled stage of all heads (31 % too little).
_HOST_LAYER = (2.2e-3, 5.4e-3)
_HOST_STAGE = (0.47e-3, 1.46e-3)
_HOST_CALL = 21e-6
PARTS = (
    "attention forward",
    "attention backward",
    "attention recompute",
    "linear forward",
    "linear backward",
    "linear recompute",
    "element-wise",
    "launches",
    "loss",
    "exchange, not hidden",
    "ring",
    "host, not hidden",
    "offload, not hidden",
    "FSDP, not hidden",
    "optimizer",
)


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step by part; longest_layer: of one layer's backward."""

    parts: dict[str, float]
    longest_layer: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Pass:
    """Seconds of one pass over a layer; host: beside the rest."""

    attention: float = 0.0
    linear: float = 0.0
    elementwise: float = 0.0
    launches: float = 0.0
    exchange: float = 0.0
    ring: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, f.name) for f in fields(self)) - self.host


class Timer:
    def __init__(self, job: Job, activations: Activations, state: Sharded) -> None:
        self.job, self.activations, self.state = job, activations, state
        self.hw = job.cluster.hardware
        self.sizes = activations.attention
        self.stages = job.heads.stages

    def step(self) -> StepTime:
        job, parts = self.job, dict.fromkeys(PARTS, 0.0)
        passes: dict[str, tuple[_Pass, _Pass, _Pass]] = {}
        longest = 0.0
        for index, layer in enumerate(job.layers):
            if layer.mode not in passes:
                passes[layer.mode] = self._forward(), self._replay(layer), self._backward()
            forward, replay, backward = passes[layer.mode]
            again = self._again(index)
            parts["attention forward"] += forward.attention
            parts["attention backward"] += backward.attention
            parts["attention recompute"] += replay.attention + again.attention
            parts["linear forward"] += forward.linear
            parts["linear backward"] += backward.linear
            parts["linear recompute"] += replay.linear + again.linear
            for one in (forward, replay, backward, again):
                parts["element-wise"] += one.elementwise
                parts["launches"] += one.launches
                parts["exchange, not hidden"] += one.exchange
                parts["ring"] += one.ring
            behind = forward.total, replay.total + backward.total + again.total
            hosts = forward.host, replay.host + backward.host + again.host
            for device, host in zip(behind, hosts, strict=True):
                parts["host, not hidden"] += max(0.0, host - device)
            parts["offload, not hidden"] += self._offload(layer, *behind)
            parts["FSDP, not hidden"] += self._fsdp(index + 1, *behind)
            longest = max(longest, behind[1])
        parts["loss"] = sum(self._tiles(cost, job.config.tiling.loss_tokens) for cost in self.loss)
        for unit in (0, len(self.state.units) - 1):
            parts["FSDP, not hidden"] += self._fsdp(unit, 0.0, 0.0)
        parts = {name: seconds * job.accumulation for name, seconds in parts.items()}
        parts["optimizer"] = self._optimizer()
        return StepTime(parts, longest)

    # -- one layer

    @property
    def loss(self) -> tuple[Cost, ...]:
        return self.activations.loss_costs

    def _forward(self) -> _Pass:
        costs, tiling = self.activations.projection_costs, self.job.config.tiling
        attention = self._attention_forward()
        mlp = self._work([(self.activations.mlp_costs[0], 1)], tiling.mlp_tokens)
        output = self._work([(costs.output, 1)], tiling.projection_tokens)
        return _sum([attention, mlp, output, _Pass(host=_HOST_LAYER[0])])

    def _replay(self, layer: LayerPlacement) -> _Pass:
        """What comes before a layer's backward: nothing, h1 alone, or all of attention."""
        if layer.mode == "none":
            return _Pass()
        costs, tokens = self.activations.projection_costs, self.job.config.tiling.projection_tokens
        output = self._work([(costs.output, 1)], tokens)
        return _sum([self._attention_forward(), output]) if layer.mode == "full" else output

    def _again(self, index: int) -> _Pass:
        """A layer whose input is not kept is made from the one before: that runs once more."""
        layers = self.job.layers
        if index + 1 >= len(layers) or layers[index + 1].keeps_input:
            return _Pass()
        costs, tiling = self.activations.projection_costs, self.job.config.tiling
        # Attention is taken from where it is kept, or else kept for this layer's own backward.
        output = self._work([(costs.output, 1)], tiling.projection_tokens)
        return _sum([output, self._work([(self.activations.mlp_costs[0], 1)], tiling.mlp_tokens)])

    def _attention_forward(self) -> _Pass:
        costs, s = self.activations.projection_costs, self.sizes
        tokens = self.job.config.tiling.projection_tokens
        arrivals = self._arrivals()
        project = self._projecting()
        norm = self._work([(costs.norm, 1 if self.job.hold_normed_input else 0)], tokens)
        heads = sum(s.packed(stage.q_heads) for stage in self.stages)
        kv_heads = 2 * sum(s.packed(self.stages[a].kv_heads) for a in arrivals)
        seconds = self._kernel(0)
        ring = self._ring(seconds, s.itemsize) + self._ring_sums(backward=False)
        calls = len(self.stages) + 2 * len(arrivals)
        exchange = self._exchange(heads + kv_heads, calls)
        exchange += self._exchange(heads, len(self.stages), beside=project)
        host = _Pass(host=len(self.stages) * _HOST_STAGE[0])
        return _sum([_Pass(seconds, exchange=exchange, ring=ring), project, norm, host])

    def _backward(self) -> _Pass:
        costs, tiling, s = self.activations.projection_costs, self.job.config.tiling, self.sizes
        arrivals = self._arrivals()
        due = arrivals
        if not self.job.sum_kv_gradients:
            due = [arrival for stage in self.stages for arrival in stage.arrivals]
        stages, tokens = len(self.stages), tiling.projection_tokens
        project = _sum([self._projecting(), self._work([(costs.output_backward, stages)], tokens)])
        finish = self._work(
            [(costs.query_backward, stages), (costs.key_value_backward, len(due))], tokens
        )
        heads = sum(s.packed(stage.q_heads) for stage in self.stages)
        kv_heads, dkv_heads = (
            2 * sum(s.packed(self.stages[a].kv_heads) for a in each) for each in (arrivals, due)
        )
        exchange = self._exchange(
            3 * heads + kv_heads, 3 * stages + 2 * len(arrivals), beside=finish
        )
        exchange += self._exchange(heads + dkv_heads, stages + 2 * len(due), beside=project)
        seconds = self._kernel(1)
        ring = self._ring(seconds, s.itemsize + s.wide) + self._ring_sums(backward=True)
        norms = [(costs.norm_backward, 1), (costs.norm, 1 if self.job.hold_normed_input else 0)]
        return _sum(
            [
                _Pass(seconds, exchange=exchange, ring=ring),
                project,
                finish,
                self._work(norms, tokens),
                self._work([(self.activations.mlp_costs[1], 1)], tiling.mlp_tokens),
                _Pass(host=_HOST_LAYER[1] + stages * _HOST_STAGE[1]),
            ]
        )

    def _projecting(self) -> _Pass:
        """q of all stages, k and v where they arrive."""
        costs, tokens = self.activations.projection_costs, self.job.config.tiling.projection_tokens
        work = [(costs.query, len(self.stages)), (costs.key_value, len(self._arrivals()))]
        return self._work(work, tokens)

    def _arrivals(self) -> list[int]:
        return [index for index, stage in enumerate(self.stages) if any(stage.kv_heads)]

    # -- work over rate

    def _kernel(self, backward: int) -> float:
        """Seconds of one layer's attention kernels on the rank that owns most heads."""
        job, d = self.job, self.job.model.args.head_dim
        heads = sum(len(stage.q_heads[0]) for stage in self.stages)
        flops = 2.0 * job.rows * heads * d * job.seq_len**2 / job.ring
        # A ring calls its kernel on a part of the row at a time, where it is no faster.
        lengths = {job.seq_len, max(1, job.seq_len // job.ring)}
        rate = min(self.hw.attention_flops(job.kernel, n, d)[backward] for n in lengths)
        return flops * (_BACKWARD if backward else 1.0) / rate

    def _work(self, work: Iterable[tuple[Cost, float]], tile_tokens: int) -> _Pass:
        _, tiles = self.job.tile(tile_tokens)
        flops = traffic = calls = 0.0
        for cost, times in work:
            flops += times * tiles * cost.flops
            traffic += times * tiles * cost.traffic
            calls += times * tiles * cost.calls
        left = _COMPILED if self.job.config.compile.enable else 1.0
        return _Pass(
            linear=flops / self.hw.matrix_flops,
            elementwise=left * traffic / self._bandwidth,
            launches=left * calls * self.hw.launch_us * 1e-6,
            host=calls * _HOST_CALL,
        )

    def _tiles(self, cost: Cost, tile_tokens: int) -> float:
        return self._work([(cost, 1)], tile_tokens).total

    @property
    def _bandwidth(self) -> float:
        return _OF_BANDWIDTH * self.hw.memory_gbs * 1e9

    # -- what travels

    def _exchange(self, sent: int, calls: int, beside: _Pass | None = None) -> float:
        """Of all stages. beside: the work that it overlaps, but for one stage: what the first one needs and the
        last one gives. What each of the ``calls`` takes beyond its bytes is not hidden: a projection that
        fills the GPU and an exchange that takes some of its multiprocessors delay each other by as much."""
        u, stages = self.job.ulysses, len(self.stages)
        if u == 1:
            return 0.0
        seconds = sent * (u - 1) / u / self._link(u)
        fixed = calls * self.hw.exchange_us * 1e-6
        if not self.job.overlap_exchange or beside is None:
            return fixed + seconds
        inner = (stages - 1) / stages
        return fixed + seconds * (1 - inner) + max(0.0, seconds - beside.total) * inner

    def _link(self, ranks: int) -> float:
        """Bytes per second of a group of neighbours."""
        inside = self.job.cluster.gpus_per_node % ranks == 0
        return 1e9 * (self.hw.link_gbs if inside else self.hw.network_gbs)

    def _ring(self, kernel_seconds: float, bytes_per_element: int) -> float:
        """What is left of the transfers after the kernels they run beside; the last of the gradients'
        has none."""
        job, s = self.job, self.sizes
        if job.ring == 1:
            return 0.0
        element = s.per_head() // s.itemsize * job.ulysses
        travelling = sum(
            2 * max(seg.kv_stop - seg.kv_start for seg in stage.segments[0]) * element
            for stage in self.stages
        )
        rate = self._link(job.cp)
        hop = travelling * bytes_per_element / rate
        beside = kernel_seconds / job.ring
        last = hop if bytes_per_element > s.itemsize else 0.0
        return (job.ring - 1) * max(0.0, hop - beside) + last

    def _ring_sums(self, backward: bool) -> float:
        """Partial results folded into sums in fp32: Ring.forward with merge, Ring.backward."""
        job, s = self.job, self.sizes
        element = job.rows * job.tokens * job.ulysses * s.head_dim
        queries = element * sum(len(stage.q_heads[0]) for stage in self.stages)
        keys = element * sum(
            2 * max(seg.kv_stop - seg.kv_start for seg in stage.segments[0])
            for stage in self.stages
        )
        # Scaled in place, a product, added in place; backward added in place, and for k and v made zero
        # and added to what arrives.
        forward = queries * (2 * s.wide + (s.itemsize + s.wide) + 3 * s.wide)
        added = 2 * s.wide + s.itemsize
        traffic = queries * added + keys * (s.wide + added + 3 * s.wide) if backward else forward
        return (job.ring - 1) * traffic / self._bandwidth

    def _offload(self, layer: LayerPlacement, forward: float, backward: float) -> float:
        """Out beside the layer's forward. Back: with early fetching beside the backward of the layer after
        it; else outputs are waited for before h1 is made, each stage's but for the projections that run
        meanwhile, and the input but for the norm's backward in the layer after it."""
        job = self.job
        rate = 1e9 * self.hw.pcie_gbs
        inputs = job.hidden if layer.input_on_host else 0
        outputs = job.outputs if layer.outputs_on_host and layer.mode == "selective" else 0
        again = job.outputs if layer.outputs_on_host and layer.mode == "full" else 0
        late = max(0.0, (inputs + outputs) / rate - forward)
        if job.early_fetch:
            return late + max(0.0, (inputs + outputs) / rate - backward)
        between = self._between_kernels()
        first = 1 / len(self.stages)
        stages = (outputs + again) / rate
        waits = outputs / rate + max(0.0, stages * (1 - first) - between * (1 - first))
        norm = self.activations.projection_costs.norm_backward
        hides = self._tiles(norm, job.config.tiling.projection_tokens)
        return late + waits + max(0.0, inputs / rate - hides)

    def _between_kernels(self) -> float:
        """Seconds of a layer's backward from a stage's kernel to the use of the next one's outputs, of all
        stages."""
        if self.job.overlap_exchange:  # outputs are needed before what is turned into gradients
            return self._projecting().total
        backward = self._backward()
        mlp = self._tiles(self.activations.mlp_costs[1], self.job.config.tiling.mlp_tokens)
        return backward.total - backward.attention - mlp

    def _fsdp(self, unit: int, forward: float, backward: float) -> float:
        """Gather beside the unit before, gather and reduce beside the unit after."""
        state, cluster = self.state, self.job.cluster
        if state.shards == 1:
            return 0.0
        size = state.units[unit].padded(state.shards) * (state.shards - 1) / state.shards
        rate = 1e9 * self.hw.link_gbs
        if cluster.nodes > 1:
            rate = min(rate, 1e9 * self.hw.network_gbs * cluster.gpus_per_node)
        gather, reduce = size * state.param / rate, size * state.reduce / rate
        if state.on_host:
            gather += size / state.shards * state.master / (1e9 * self.hw.pcie_gbs)
        back = reduce if state.units[unit].keeps else gather + reduce
        return max(0.0, gather - forward) + max(0.0, back - backward)

    def _optimizer(self) -> float:
        """Norm and scaling of the gradients (3 passes), then the update: reads four values of a parameter
        with Adam and writes three."""
        state = self.state
        size = state.shard_bytes
        update = (4 + 3 if state.moments else 2 + 1) * size
        if state.on_host:
            node = self.job.cluster.gpus_per_node
            return node * (3 * size + update) / (1e9 * self.hw.host_optimizer_gbs)
        seconds = (3 * size + update) / self._bandwidth
        if state.moments_on_host:
            seconds = max(seconds, state.moments * size / (1e9 * self.hw.pcie_gbs))
        return seconds


def _sum(passes: Iterable[_Pass]) -> _Pass:
    passes = list(passes)
    return _Pass(*(sum(getattr(one, f.name) for one in passes) for f in fields(_Pass)))
