"""What the attention half of a block holds, in plain integers: its own answer to a planner.

Each function walks through the same steps as the method of `AttentionHalf` (half.py) or `Ring` (ring.py)
that its docstring names and writes down what is allocated and freed. A change there belongs here too;
tests/unit/plan/test_attention_buffers.py compares both on real tensors.

The rank is the one that owns most heads. Letters: T tokens of a rank, S those of all ranks that exchange
heads, D head size, n query and m KV heads of the rank at a stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_lc.attention.heads import HeadPlan, Heads, Stage
from torchtitan_lc.tools.ledger import Ledger

_FLASH_BLOCK = 128  # tokens to which flash kernels round their accumulators


@dataclass(frozen=True)
class Tiles:
    """Bytes of one tile of tokens at its worst moment, for the widest stage: temporaries of a model's
    projections, in the order in which half.py calls them."""

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
    def copies(self) -> int:
        """Buffers of a stage that an exchange copies because rows lie side by side."""
        return 1 if self.exchanges and self.rows > 1 else 0


def kept(s: Sizes) -> int:
    """out and log-sum-exp of all stages: what `selective` keeps for a layer."""
    return sum(s.outputs(index) for index in range(len(s.plan.stages)))


# -- kernels


def forward_workspace(
    kernel: str, n: int, m: int, queries: int, keys: int, d: int, wide: int
) -> int:
    """Bytes that a kernel allocates beside its results; queries and keys are tokens of all rows."""
    if kernel == "math":
        return 3 * n * queries * keys * wide
    return 0


def backward_workspace(
    kernel: str, n: int, m: int, queries: int, keys: int, d: int, wide: int
) -> int:
    """The flash family sums dq in fp32, with two numbers per query beside it; dk and dv of grouped heads
    in fp32 (FlashAttention 3 and 4), or in the inputs' dtype for every query head (2)."""
    if kernel == "math":
        return 5 * n * queries * keys * wide
    if kernel == "cpu":
        return n * queries * wide
    queries = -(-queries // _FLASH_BLOCK) * _FLASH_BLOCK
    keys = -(-keys // _FLASH_BLOCK) * _FLASH_BLOCK
    size = n * queries * d * wide
    if kernel == "stand-in":
        return size
    size += 2 * n * queries * wide
    if n == m or kernel == "cudnn":
        return size
    if kernel in ("sdpa", "fa2"):
        return size + 2 * n * keys * d * (wide // 2)
    return size + 2 * m * keys * d * wide


# -- forward: AttentionHalf._attend and _add_outputs


def forward(ledger: Ledger, s: Sizes) -> None:
    """From h (in the ledger already) to h1; "attention output" (out and log-sum-exp) is kept, and
    "h1" is alive at the end."""
    if s.hold_normed_input:
        ledger.take("normed input", s.hidden)
        ledger.moment(projection_tile=s.tiles.norm)
    previous_out = 0
    for stage in s.plan.stages:
        if any(stage.kv_heads):
            _project_key_value(ledger, s, stage)
        _project_query(ledger, s, stage)
        out = s.mine(stage.q_heads)
        lse = s.lse(len(stage.q_heads[0]))
        _kernel_forward(ledger, s, stage)
        ledger.take("attention output", lse)
        ledger.take("out", out)
        ledger.free("q", s.mine(stage.q_heads))
        ledger.free("out", previous_out)
        for arrival in stage.releases:
            ledger.free("k and v", 2 * s.mine(s.plan.stages[arrival].kv_heads))
        if s.exchanges:
            with ledger.during(exchange=s.copies * out):
                ledger.take("attention output", s.packed(stage.q_heads))
            previous_out = out
        else:
            ledger.take("attention output", out)
            ledger.free("out", out)
    ledger.free("out", previous_out)
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
    tokens = s.rows * s.plan.ranks * s.tokens
    if s.ring > 1:
        _ring_forward(ledger, s, n, max(seg.kv_stop - seg.kv_start for seg in segments))
    heads = max(segments, key=lambda seg: seg.q_stop - seg.q_start)
    work = forward_workspace(
        s.kernel,
        heads.q_stop - heads.q_start,
        heads.kv_stop - heads.kv_start,
        tokens,
        s.plan.ranks * s.tokens,
        s.head_dim,
        s.wide,
    )
    joined = q + s.lse(n) if len(segments) > 1 else 0  # parts, while they are joined
    ledger.moment(out=q + s.lse(n), kernel_workspace=max(work, joined))


def _ring_forward(ledger: Ledger, s: Sizes, n: int, m: int) -> None:
    """Ring.forward: the sum of out in fp32, k and v at hand, on their way, and those of the first step; a
    part and its product."""
    head = s.plan.ranks * s.per_head()
    wide = head * s.wide // s.itemsize
    ledger.moment(
        ring_k_and_v=min(s.ring - 1, 3) * 2 * m * head,
        ring_sums=n * wide + s.lse(n),
        out=n * head + s.lse(n),
        ring_part=n * head + s.lse(n) + n * wide,
    )


def _project_query(ledger: Ledger, s: Sizes, stage: Stage) -> None:
    """Leaves "q" in head layout."""
    packed, mine = s.packed(stage.q_heads), s.mine(stage.q_heads)
    ledger.take("q", packed)
    ledger.moment(projection_tile=s.tiles.query)
    if s.exchanges:
        ledger.take("q", mine)
        ledger.moment(exchange=s.copies * mine)
        ledger.free("q", packed)


def _project_key_value(ledger: Ledger, s: Sizes, stage: Stage) -> None:
    """Leaves "k and v" of the heads that arrive with the stage."""
    packed, mine = s.packed(stage.kv_heads), s.mine(stage.kv_heads)
    ledger.take("k and v", 2 * packed)
    ledger.moment(projection_tile=s.tiles.key_value)
    if s.exchanges:
        for _ in range(2):
            ledger.take("k and v", mine)
            ledger.moment(exchange=s.copies * mine)
            ledger.free("k and v", packed)


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
    ledger.take("dx", s.hidden)
    if s.hold_normed_input:
        ledger.take("normed input", s.hidden)
        ledger.moment(projection_tile=s.tiles.norm)
    sums = [weights * s.wide for weights in s.weights]
    summed: dict[int, int] = {}  # bytes of dk and dv, by the arrival that they belong to
    stages = s.plan.stages

    def weight_sum(which: int) -> None:
        ledger.take("weight gradients", sums[which])
        sums[which] = 0

    def fetch_after(index: int) -> None:
        if index + 1 == len(stages):
            ledger.take("ahead", kept.ahead)
        elif kept.on_host and not kept.early:
            ledger.take("attention output", s.outputs(index + 1))

    for index, stage in enumerate(stages):
        n = len(stage.q_heads[0])
        mine, packed = s.mine(stage.q_heads), s.packed(stage.q_heads)
        if any(stage.kv_heads):
            _project_key_value(ledger, s, stage)
        # _output_backward, then dout and out in head layout
        ledger.take("dout", packed)
        ledger.moment(projection_tile=s.tiles.output_backward)
        weight_sum(2)
        if s.exchanges:
            ledger.take("dout", mine)
            ledger.moment(exchange=s.copies * mine)
            ledger.free("dout", packed)
            ledger.take("out", mine)
            ledger.moment(exchange=s.copies * mine)
            if not kept.held_by_graph:
                ledger.free("attention output", packed)
        _project_query(ledger, s, stage)
        if kept.early:
            fetch_after(index)
        _kernel_backward(ledger, s, stage, summed)
        for name in ("q", "dout", "out"):
            ledger.free(name)
        if not kept.held_by_graph:
            ledger.free("attention output", s.lse(n) + (0 if s.exchanges else packed))
        for arrival in stage.releases:
            ledger.free("k and v", 2 * s.mine(stages[arrival].kv_heads))
        if not kept.early:
            fetch_after(index)
        # _query_backward
        if len(stage.segments[0]) > 1:
            ledger.moment(dq=mine)
        if s.exchanges:
            ledger.take("dq", packed)
            ledger.moment(exchange=s.copies * mine)
            ledger.free("dq", mine)
        ledger.moment(projection_tile=s.tiles.query_backward)
        weight_sum(0)
        ledger.free("dq")
        # _key_value_backward
        for arrival in stage.releases if s.sum_kv_gradients else stage.arrivals:
            heads = stages[arrival].kv_heads
            if arrival not in summed:  # other ranks' stage, not this one's: zeros
                ledger.take("dk and dv", 2 * s.mine(heads))
            summed.pop(arrival, None)
            if s.exchanges:
                for _ in range(2):
                    ledger.take("dk and dv", s.packed(heads))
                    ledger.moment(exchange=s.copies * s.mine(heads))
                    ledger.free("dk and dv", s.mine(heads))
            ledger.moment(projection_tile=s.tiles.key_value_backward)
            weight_sum(1)
            ledger.free("dk and dv", 2 * s.packed(heads))
    if s.hold_normed_input:
        ledger.free("normed input")
    ledger.moment(projection_tile=s.tiles.norm_backward)
    results = sum(s.weights) * s.itemsize
    ledger.take("weight gradients", results)
    ledger.free("weight gradients", sum(s.weights) * s.wide)


def _kernel_backward(ledger: Ledger, s: Sizes, stage: Stage, summed: dict[int, int]) -> None:
    """Leaves "dq", and "dk and dv": the first call's become the sum, others' are added to it."""
    head = s.plan.ranks * s.per_head()
    tokens = s.plan.ranks * s.tokens
    segments = stage.segments[0]
    for seg in segments:
        n, m = seg.q_stop - seg.q_start, seg.kv_stop - seg.kv_start
        dkv = 2 * m * head
        arrived = 2 * s.mine(s.plan.stages[seg.arrival].kv_heads)
        ledger.take("dq", n * head)
        ledger.take("dk and dv", dkv)
        work = backward_workspace(
            s.kernel, n, m, s.rows * tokens, s.rows * tokens, s.head_dim, s.wide
        )
        if len(segments) > 1:
            ledger.take("lse of the call", s.lse(n))
        if s.ring > 1:
            _ring_backward(ledger, s, n, m, work)
        else:
            ledger.moment(kernel_workspace=work)
        if len(segments) > 1:
            ledger.free("lse of the call")
        if seg.arrival not in summed:
            summed[seg.arrival] = arrived
            ledger.take("dk and dv", 0 if dkv == arrived else arrived)
            ledger.free("dk and dv", 0 if dkv == arrived else dkv)
        else:
            ledger.free("dk and dv", dkv)


def _ring_backward(ledger: Ledger, s: Sizes, n: int, m: int, work: int) -> None:
    """Ring.backward: dq in fp32, and dk and dv: of the step, leaving, arriving, and those that arrived
    before. Of the rank whose queries all meet half of the keys."""
    head = s.plan.ranks * s.per_head()
    wide = head * s.wide // s.itemsize
    steps = s.ring - 1
    part = n * head + m * head
    with ledger.during(
        ring_k_and_v=min(steps, 3) * 2 * m * head,
        ring_sums=n * wide + min(steps + 2, 4) * 2 * m * wide,
        ring_part=min(steps - 1, 1) * part,
    ):
        ledger.moment(ring_part=part, kernel_workspace=work)
