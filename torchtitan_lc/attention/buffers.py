"""What the attention half of a block holds, in plain integers: its own answer to a planner.

Each function walks through the same steps as the method of `AttentionHalf` (half.py), `TiledProjections`
(projecting.py) or `Ring` (ring.py) that its docstring names and writes down what is allocated and freed. A
change there belongs here too; tests/unit/plan/test_attention_buffers.py compares both on the meta device.

The rank is the one that owns most heads. Letters: T tokens of a rank, S those of all ranks that exchange
heads, D head size, n query and m KV heads of the rank at a stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_lc.attention.heads import HeadPlan, Heads, Stage
from torchtitan_lc.attention.kernels.split import WHOLE
from torchtitan_lc.tools.ledger import Ledger

_FLASH_BLOCK = 128  # tokens to which flash kernels round their accumulators


@dataclass(frozen=True)
class Tiles:
    """Bytes of one tile of tokens at its worst moment, for the widest stage: temporaries of a model's
    projections, in the order in which projecting.py makes them."""

    query: int = 0
    key_value: int = 0
    output: int = 0
    output_backward: int = 0
    query_backward: int = 0
    key_value_backward: int = 0
    norm: int = 0
    norm_backward: int = 0


@dataclass(frozen=True)
class Sizes:
    """A job's numbers as attention sees them.

    tokens: T. itemsize: bytes per element of the activations. ring: ranks that pass K and V round.
    kernel: its name; in a ring the inner one's. weights: elements of the projections' weights (query, key
    and value together, output), whose gradients are summed in fp32.
    """

    plan: HeadPlan
    rows: int
    tokens: int
    width: int
    head_dim: int
    itemsize: int
    kernel: str
    ring: int = 1
    hold_normed_input: bool = False
    sum_kv_gradients: bool = True
    overlap_exchange: bool = False
    tiles: Tiles = Tiles()
    weights: tuple[int, int, int] = (0, 0, 0)

    @property
    def hidden(self) -> int:
        """One hidden-state buffer: B."""
        return self.rows * self.tokens * self.width * self.itemsize

    @property
    def wide(self) -> int:
        """Bytes per element of a sum: fp32, or fp64 for fp64."""
        return max(self.itemsize, 4)

    def per_head(self) -> int:
        """One head of T tokens."""
        return self.rows * self.tokens * self.head_dim * self.itemsize

    def packed(self, heads: tuple[Heads, ...]) -> int:
        """Sequence layout: this rank's tokens of every rank's heads."""
        return sum(map(len, heads)) * self.per_head()

    def mine(self, heads: tuple[Heads, ...]) -> int:
        """Head layout: all S tokens of this rank's heads."""
        return len(heads[0]) * self.plan.ranks * self.per_head()

    def lse(self, n: int) -> int:
        return self.rows * self.plan.ranks * self.tokens * n * self.wide

    def outputs(self, index: int) -> int:
        """out, in sequence layout, and log-sum-exp of a stage."""
        stage = self.plan.stages[index]
        return self.packed(stage.q_heads) + self.lse(len(stage.q_heads[0]))

    @property
    def exchanges(self) -> bool:
        return self.plan.ranks > 1

    @property
    def overlaps(self) -> bool:
        return self.exchanges and self.overlap_exchange

    @property
    def copies(self) -> int:
        """Buffers of a stage that an exchange copies because rows lie side by side."""
        return 1 if self.exchanges and self.rows > 1 else 0

    @property
    def head(self) -> int:
        """One head of S tokens."""
        return self.plan.ranks * self.per_head()


def kept(s: Sizes) -> int:
    """out and log-sum-exp of all stages: what `selective` keeps for a layer."""
    return sum(s.outputs(index) for index in range(len(s.plan.stages)))


# -- kernels


def forward_workspace(kernel: str, n: int, queries: int, keys: int, wide: int) -> int:
    """Bytes that a kernel allocates beside its results; queries and keys are tokens of all rows."""
    return 3 * n * queries * keys * wide if kernel == "math" else 0


def backward_workspace(
    kernel: str, n: int, m: int, queries: int, keys: int, d: int, itemsize: int
) -> int:
    """The same of a backward call as `SplitGroups` (kernels/split.py) makes it: whole, or a member of
    each group at a time, whose results lie beside those of all."""
    wide = max(itemsize, 4)
    if n <= m or n * queries * d <= WHOLE:
        return _of_one_call(kernel, n, m, queries, keys, d, wide)
    part = m * (queries + 2 * keys) * d * itemsize + m * queries * wide
    return part + _of_one_call(kernel, m, m, queries, keys, d, wide)


def _of_one_call(kernel: str, n: int, m: int, queries: int, keys: int, d: int, wide: int) -> int:
    """The flash family sums dq in fp32, with two numbers per query beside it; dk and dv of grouped heads
    in fp32 (FlashAttention 3 and 4), or in the inputs' dtype for every query head (2)."""
    if kernel == "math":
        return 5 * n * queries * keys * wide
    if kernel == "cpu":
        return n * queries * wide
    if kernel == "stand-in":
        return (n * queries + (2 * m * keys if n > m else 0)) * d * wide
    queries = -(-queries // _FLASH_BLOCK) * _FLASH_BLOCK
    keys = -(-keys // _FLASH_BLOCK) * _FLASH_BLOCK
    size = n * queries * (d + 2) * wide
    if n == m or kernel == "cudnn":
        return size
    if kernel in ("sdpa", "fa2"):
        return size + 2 * n * keys * d * (wide // 2)
    return size + 2 * m * keys * d * wide


# -- forward: AttentionHalf._attend, and TiledProjections.add_outputs


def forward(ledger: Ledger, s: Sizes) -> None:
    """From h (in the ledger already) to h1; "attention output" (out and log-sum-exp) is kept, and
    "h1" is alive at the end."""
    stages = s.plan.stages
    if s.hold_normed_input:
        ledger.take("normed input", s.hidden)
        ledger.moment(projection_tile=s.tiles.norm)
    _project_inputs(ledger, s, stages[0])
    under_way = 0
    for index, stage in enumerate(stages):
        _inputs_arrive(ledger, s, stage)
        if s.overlaps and index + 1 < len(stages):
            _project_inputs(ledger, s, stages[index + 1])
        out = s.mine(stage.q_heads)
        _kernel_forward(ledger, s, stage)
        ledger.take("attention output", s.lse(len(stage.q_heads[0])))
        ledger.take("out", out)
        ledger.free("q", out)
        for arrival in stage.releases:
            ledger.free("k and v", 2 * s.mine(stages[arrival].kv_heads))
        if s.exchanges:
            with ledger.during(exchange=s.copies * out):
                ledger.take("attention output", s.packed(stage.q_heads))
        else:
            ledger.take("attention output", out)
        ledger.free("out", under_way if s.overlaps else out)
        under_way = out
        if not s.overlaps and index + 1 < len(stages):
            _project_inputs(ledger, s, stages[index + 1])
    if s.overlaps:
        ledger.free("out", under_way)
    if s.hold_normed_input:
        ledger.free("normed input")
    add_outputs(ledger, s)


def add_outputs(ledger: Ledger, s: Sizes) -> None:
    """h1 from h and the kept out: the end of forward, and all of a recomputation that kept it."""
    ledger.take("h1", s.hidden)
    ledger.moment(projection_tile=s.tiles.output)


def _kernel_forward(ledger: Ledger, s: Sizes, stage: Stage) -> None:
    """Whatever lives beside q, k, v while out is made; the results are its caller's to write down."""
    segments = stage.segments[0]
    n, q = len(stage.q_heads[0]), s.mine(stage.q_heads)
    if s.ring > 1:
        _ring_forward(ledger, s, n, max(seg.kv_stop - seg.kv_start for seg in segments))
    tokens = s.plan.ranks * s.tokens
    heads = max(seg.q_stop - seg.q_start for seg in segments)
    work = forward_workspace(s.kernel, heads, s.rows * tokens, tokens, s.wide)
    joined = q + s.lse(n) if len(segments) > 1 else 0  # parts, while they are joined
    ledger.moment(out=q + s.lse(n), kernel_workspace=max(work, joined))


def _ring_forward(ledger: Ledger, s: Sizes, n: int, m: int) -> None:
    """Ring.forward: the sum of out in fp32, k and v at hand and on their way, and a part with its product."""
    out, lse = n * s.head, s.lse(n)
    wide = out * s.wide // s.itemsize
    ledger.moment(
        ring_k_and_v=min(s.ring - 1, 2) * 2 * m * s.head,
        ring_sums=wide + lse,
        ring_part=out + lse + wide + 3 * lse,
    )
    ledger.moment(ring_sums=wide, out=out + lse)


def _project_inputs(ledger: Ledger, s: Sizes, stage: Stage) -> None:
    """AttentionHalf._inputs_of: "q", and before it "k and v" if they arrive with the stage. Where
    exchanges overlap, what is sent stays until they have ended."""
    sent_stays = s.overlaps
    if any(stage.kv_heads):
        packed, mine = s.packed(stage.kv_heads), s.mine(stage.kv_heads)
        ledger.take("k and v", 2 * packed)
        ledger.moment(projection_tile=s.tiles.key_value)
        for _ in range(2 if s.exchanges else 0):
            ledger.take("k and v", mine)
            ledger.free("k and v", 0 if sent_stays else packed)
    packed, mine = s.packed(stage.q_heads), s.mine(stage.q_heads)
    ledger.take("q", packed)
    ledger.moment(projection_tile=s.tiles.query)
    if s.exchanges:
        ledger.take("q", mine)
        ledger.free("q", 0 if sent_stays else packed)


def _inputs_arrive(ledger: Ledger, s: Sizes, stage: Stage) -> None:
    if any(stage.kv_heads):
        for _ in range(2):
            _arrive(ledger, s, "k and v", stage.kv_heads)
    _arrive(ledger, s, "q", stage.q_heads)


def _arrive(ledger: Ledger, s: Sizes, name: str, heads: tuple[Heads, ...]) -> None:
    """Travelling.arrive, to head layout."""
    if s.overlaps:
        ledger.free(name, s.packed(heads))
    ledger.moment(exchange=s.copies * s.mine(heads))


# -- backward: AttentionHalf.backward


@dataclass(frozen=True)
class Kept:
    """Where a layer's out and log-sum-exp lie when its backward begins.

    held_by_graph: autograd holds them to the end (mode `none`). on_host: each stage's come back after
    the kernel of the stage before, or with ``early`` before it. ahead: bytes that are fetched for the
    layer that backward comes to next, at the last stage.
    """

    held_by_graph: bool = False
    on_host: bool = False
    early: bool = False
    ahead: int = 0


def await_backward(ledger: Ledger, s: Sizes, kept: Kept) -> None:
    """Outputs.await_backward (ops/recompute.py): what has been read for h1 leaves, but for the first
    stage's, until its stage comes."""
    if kept.on_host and not kept.early:
        for index in range(1, len(s.plan.stages)):
            ledger.free("attention output", s.outputs(index))


def backward(ledger: Ledger, s: Sizes, kept: Kept) -> None:
    """From "dh1" to the gradient of h; h and "attention output" are in the ledger already.

    Leaves "dx" (at the end the gradient of h), "weight gradients" and what was fetched "ahead".
    """
    _Backward(ledger, s, kept).run()


class _Backward:
    """One pass, with what it carries from stage to stage.

    summed: bytes of dk and dv, by the arrival that they belong to. taken: stages whose outputs have been read
    from where they were kept; on_device: those whose outputs are on the GPU.
    """

    def __init__(self, ledger: Ledger, s: Sizes, kept: Kept) -> None:
        self.ledger, self.s, self.kept = ledger, s, kept
        self.stages = s.plan.stages
        self.weight_sums = [weights * s.wide for weights in s.weights]
        self.summed: dict[int, int] = {}
        self.taken = 0
        self.on_device = {
            index
            for index in range(len(self.stages))
            if index == 0 or kept.early or not kept.on_host
        }

    def run(self) -> None:
        ledger, s, stages = self.ledger, self.s, self.stages
        ledger.take("dx", s.hidden)
        if s.hold_normed_input:
            ledger.take("normed input", s.hidden)
            ledger.moment(projection_tile=s.tiles.norm)
        self._project_inputs(0)
        back: int | None = None  # the stage whose gradients are under way
        for index, stage in enumerate(stages):
            self._inputs_arrive(stage)
            more = index + 1 < len(stages)
            if s.overlaps and more:
                self._project_inputs(index + 1)
            if self.kept.early:
                self._fetch_next()
            self._kernel(stage)
            self._let_go_of_inputs(stage)
            if not self.kept.early and self.taken < len(stages):
                self._fetch(self.taken)
            self._send_back(stage)
            if not s.overlaps:
                self._finish(stage)
                if more:
                    self._project_inputs(index + 1)
                continue
            if back is not None:
                self._finish(stages[back])
            back = index
        if back is not None:
            self._finish(stages[back])
        self._fetch_ahead()
        if s.hold_normed_input:
            ledger.free("normed input")
        ledger.moment(projection_tile=s.tiles.norm_backward)
        ledger.take("weight gradients", sum(s.weights) * s.itemsize)
        ledger.free("weight gradients", sum(s.weights) * s.wide)

    def _fetch(self, index: int) -> None:
        if index not in self.on_device:
            self.on_device.add(index)
            self.ledger.take("attention output", self.s.outputs(index))

    def _fetch_next(self) -> None:
        """Outputs.before_kernel (ops/recompute.py), where it fetches early."""
        if self.taken < len(self.stages):
            self._fetch(self.taken)
        else:
            self._fetch_ahead()

    def _fetch_ahead(self) -> None:
        if "ahead" not in self.ledger.now:
            self.ledger.take("ahead", self.kept.ahead)

    def _project_inputs(self, index: int) -> None:
        """AttentionHalf._backward_inputs_of."""
        ledger, s, stage = self.ledger, self.s, self.stages[index]
        mine, packed = s.mine(stage.q_heads), s.packed(stage.q_heads)
        self._fetch(index)
        self.taken = index + 1
        ledger.take("dout", packed)
        ledger.moment(projection_tile=s.tiles.output_backward)
        self._weight_sum(2)
        if s.exchanges:
            ledger.take("dout", mine)
            ledger.free("dout", 0 if s.overlaps else packed)
            ledger.take("out", mine)
            if not s.overlaps:
                self._free_outputs(packed)
        _project_inputs(ledger, s, stage)

    def _inputs_arrive(self, stage: Stage) -> None:
        ledger, s = self.ledger, self.s
        if s.overlaps:
            self._free_outputs(s.packed(stage.q_heads))
        ledger.moment(exchange=s.copies * s.mine(stage.q_heads))
        _arrive(ledger, s, "dout", stage.q_heads)
        _inputs_arrive(ledger, s, stage)

    def _free_outputs(self, size: int) -> None:
        if not self.kept.held_by_graph:
            self.ledger.free("attention output", size)

    def _weight_sum(self, which: int) -> None:
        self.ledger.take("weight gradients", self.weight_sums[which])
        self.weight_sums[which] = 0

    def _kernel(self, stage: Stage) -> None:
        """Leaves "dq", and "dk and dv": the first call's become the sum, others' are added to it."""
        ledger, s = self.ledger, self.s
        segments = stage.segments[0]
        for seg in segments:
            n, m = seg.q_stop - seg.q_start, seg.kv_stop - seg.kv_start
            dkv = 2 * m * s.head
            arrived = 2 * s.mine(self.stages[seg.arrival].kv_heads)
            lse = s.lse(n) if len(segments) > 1 else 0
            with ledger.during(lse_of_the_call=lse):
                if s.ring > 1:
                    _ring_backward(ledger, s, n, m)
                ledger.take("dq", n * s.head)
                ledger.take("dk and dv", dkv)
                if s.ring == 1:
                    ledger.moment(kernel_workspace=_workspace(s, n, m))
            if seg.arrival not in self.summed:
                self.summed[seg.arrival] = arrived
                ledger.take("dk and dv", 0 if dkv == arrived else arrived)
                ledger.free("dk and dv", 0 if dkv == arrived else dkv)
            else:
                ledger.free("dk and dv", dkv)

    def _let_go_of_inputs(self, stage: Stage) -> None:
        ledger, s = self.ledger, self.s
        mine = s.mine(stage.q_heads)
        for name in ("q", "dout"):
            ledger.free(name, mine)
        if s.exchanges:
            ledger.free("out", mine)
        self._free_outputs(s.lse(len(stage.q_heads[0])) + (0 if s.exchanges else mine))
        for arrival in self._due(stage):
            if arrival not in self.summed:  # another rank's stage, not this one's: zeros
                self.summed[arrival] = 2 * s.mine(self.stages[arrival].kv_heads)
                ledger.take("dk and dv", self.summed[arrival])
        for arrival in stage.releases:
            ledger.free("k and v", 2 * s.mine(self.stages[arrival].kv_heads))

    def _due(self, stage: Stage) -> tuple[int, ...]:
        return stage.releases if self.s.sum_kv_gradients else stage.arrivals

    def _send_back(self, stage: Stage) -> None:
        """AttentionHalf._send_back: where exchanges overlap, what is sent stays until they have ended."""
        ledger, s = self.ledger, self.s
        mine = s.mine(stage.q_heads)
        if len(stage.segments[0]) > 1:
            ledger.moment(dq=mine)
        for arrival in self._due(stage):
            self.summed.pop(arrival)
        if not s.exchanges:
            return
        for name, heads in self._gradients(stage):
            with ledger.during(exchange=s.copies * s.mine(heads)):
                ledger.take(name, s.packed(heads))
            ledger.free(name, 0 if s.overlaps else s.mine(heads))

    def _gradients(self, stage: Stage) -> list[tuple[str, tuple[Heads, ...]]]:
        dkv = [self.stages[arrival].kv_heads for arrival in self._due(stage)]
        return [("dq", stage.q_heads), *(("dk and dv", heads) for heads in dkv for _ in range(2))]

    def _finish(self, stage: Stage) -> None:
        """Into the gradient of the normed input, first dq, then dk and dv of one arrival after the other."""
        ledger, s = self.ledger, self.s
        if s.overlaps:
            ledger.free("dq", s.mine(stage.q_heads))
        ledger.moment(projection_tile=s.tiles.query_backward)
        self._weight_sum(0)
        ledger.free("dq", s.packed(stage.q_heads))
        for arrival in self._due(stage):
            heads = self.stages[arrival].kv_heads
            if s.overlaps:
                ledger.free("dk and dv", 2 * s.mine(heads))
            ledger.moment(projection_tile=s.tiles.key_value_backward)
            self._weight_sum(1)
            ledger.free("dk and dv", 2 * s.packed(heads))


def _workspace(s: Sizes, n: int, m: int, keys: float = 1.0) -> int:
    """Of a backward call on all of a rank's queries and a share of as many keys."""
    tokens = s.rows * s.plan.ranks * s.tokens
    return backward_workspace(s.kernel, n, m, tokens, int(tokens * keys), s.head_dim, s.itemsize)


def _ring_backward(ledger: Ledger, s: Sizes, n: int, m: int) -> None:
    """Ring.backward but for its results: dq in fp32, and dk and dv: of the step, leaving and arriving. Of the
    rank whose queries all meet half of the keys, which holds most."""
    dq, dkv = n * s.head, 2 * m * s.head
    wide = s.wide // s.itemsize
    ledger.moment(ring_k_and_v=dkv, dq=dq, dk_and_dv=dkv, kernel_workspace=_workspace(s, n, m))
    ledger.moment(ring_k_and_v=dkv, dq=dq, dk_and_dv=dkv, ring_sums=wide * (dq + dkv))
    ledger.moment(
        ring_k_and_v=min(s.ring - 1, 2) * dkv,
        ring_sums=wide * (dq + 3 * dkv),
        ring_part=dq + dkv // 2,
        kernel_workspace=_workspace(s, n, m, 0.5),
    )
    ledger.moment(dq=dq, dk_and_dv=dkv, ring_sums=wide * (dq + dkv))
