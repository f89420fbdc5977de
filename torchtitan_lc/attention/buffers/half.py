"""What one pass over the stages of the attention half holds, forward and backward."""

from __future__ import annotations

from torchtitan_lc.attention.buffers.comm import (
    heads_arrive,
    heads_to_seq,
    seq_arrives,
    seq_to_heads,
)
from torchtitan_lc.attention.buffers.kernels import backward_workspace, forward_workspace
from torchtitan_lc.attention.buffers.outputs import Kept, Outputs
from torchtitan_lc.attention.buffers.projecting import (
    WeightGradients,
    add_outputs,
    hold_normed_input,
    key_value_backward,
    norm_backward,
    output_backward,
    project_key_value,
    project_query,
    query_backward,
)
from torchtitan_lc.attention.buffers.ring import ring_backward, ring_forward
from torchtitan_lc.attention.buffers.sizes import Sizes
from torchtitan_lc.attention.heads import Stage
from torchtitan_lc.tools.ledger import Ledger

# -- forward


def forward(ledger: Ledger, s: Sizes) -> None:
    """AttentionHalf.forward: from h (in the ledger already) to h1; "attention output" (out and log-sum-exp)
    is kept, and "h1" is alive at the end."""
    stages = s.plan.stages
    hold_normed_input(ledger, s)
    _inputs_of(ledger, s, stages[0])
    for index, stage in enumerate(stages):
        more = index + 1 < len(stages)
        _arrive(ledger, s, stage)
        out = s.mine(stage.q_heads)
        _stage_forward(ledger, s, stage)
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
        if more and s.overlaps:
            _inputs_of(ledger, s, stages[index + 1])
        ledger.free("out", out)
        if more and not s.overlaps:
            _inputs_of(ledger, s, stages[index + 1])
    if s.hold_normed_input:
        ledger.free("normed input")
    add_outputs(ledger, s)


def _stage_forward(ledger: Ledger, s: Sizes, stage: Stage) -> None:
    """AttentionHalf._stage_forward: whatever lives beside q, k, v while out is made; the results are its
    caller's to write down."""
    segments = stage.segments[0]
    n, q = len(stage.q_heads[0]), s.mine(stage.q_heads)
    if s.ring > 1:
        ring_forward(ledger, s, n, max(seg.kv_stop - seg.kv_start for seg in segments))
    work = forward_workspace(s, max(seg.q_stop - seg.q_start for seg in segments))
    joined = q + s.lse(n) if len(segments) > 1 else 0  # parts, while they are joined
    ledger.moment(out=q + s.lse(n), kernel_workspace=max(work, joined))


# -- backward


def backward(ledger: Ledger, s: Sizes, kept: Kept) -> None:
    """AttentionHalf.backward: from "dh1" to the gradient of h; h and "attention output" are in the ledger
    already.

    Leaves "dx" (at the end the gradient of h), "weight gradients" and what was fetched "ahead".
    """
    _Backward(ledger, s, kept).run()


class _Backward:
    """One pass. summed: bytes of dk and dv, by the arrival that they belong to."""

    def __init__(self, ledger: Ledger, s: Sizes, kept: Kept) -> None:
        self.ledger, self.s, self.stages = ledger, s, s.plan.stages
        self.outputs = Outputs(ledger, s, kept)
        self.weights = WeightGradients(ledger, s)
        self.summed: dict[int, int] = {}

    def run(self) -> None:
        ledger, s, stages = self.ledger, self.s, self.stages
        ledger.take("dx", s.hidden)
        hold_normed_input(ledger, s)
        self._inputs_of(stages[0])
        for index, stage in enumerate(stages):
            self._arrive(stage)
            more = index + 1 < len(stages)
            self.outputs.before_kernel()
            self._stage(stage)
            self._let_go_of_inputs(stage)
            self.outputs.after_kernel()
            self._send_back(stage)
            if more and s.overlaps:
                self._inputs_of(stages[index + 1])
            self._finish(stage)
            if more and not s.overlaps:
                self._inputs_of(stages[index + 1])
        self.outputs.after_stages()
        if s.hold_normed_input:
            ledger.free("normed input")
        norm_backward(ledger, s)
        self.weights.results()

    def _inputs_of(self, stage: Stage) -> None:
        """AttentionHalf._backward_inputs_of."""
        ledger, s = self.ledger, self.s
        _inputs_of(ledger, s, stage)
        self.outputs.take()
        output_backward(ledger, s, stage, self.weights)
        seq_to_heads(ledger, s, "dout", stage.q_heads)
        if s.exchanges:
            ledger.take("out", s.mine(stage.q_heads))
            if not s.overlaps:
                self.outputs.free(s.packed(stage.q_heads))

    def _arrive(self, stage: Stage) -> None:
        """AttentionHalf._arrive: out, its gradient, and what forward has."""
        ledger, s = self.ledger, self.s
        if s.overlaps:
            self.outputs.free(s.packed(stage.q_heads))
        ledger.moment(exchange=s.copies * s.mine(stage.q_heads))
        heads_arrive(ledger, s, "dout", stage.q_heads)
        _arrive(ledger, s, stage)

    def _stage(self, stage: Stage) -> None:
        """AttentionHalf._stage_backward: leaves "dq", and "dk and dv": the first call's become the sum,
        others' are added to it."""
        ledger, s = self.ledger, self.s
        segments = stage.segments[0]
        for seg in segments:
            n, m = seg.q_stop - seg.q_start, seg.kv_stop - seg.kv_start
            dkv = 2 * m * s.head
            arrived = 2 * s.mine(self.stages[seg.arrival].kv_heads)
            lse = s.lse(n) if len(segments) > 1 else 0
            with ledger.during(lse_of_the_call=lse):
                if s.ring > 1:
                    ring_backward(ledger, s, n, m)
                ledger.take("dq", n * s.head)
                ledger.take("dk and dv", dkv)
                if s.ring == 1:
                    ledger.moment(kernel_workspace=backward_workspace(s, n, m))
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
        self.outputs.free(s.lse(len(stage.q_heads[0])) + (0 if s.exchanges else mine))
        for arrival in self._due(stage):
            if arrival not in self.summed:  # another rank's stage, not this one's: zeros
                self.summed[arrival] = 2 * s.mine(self.stages[arrival].kv_heads)
                ledger.take("dk and dv", self.summed[arrival])
        for arrival in stage.releases:
            ledger.free("k and v", 2 * s.mine(self.stages[arrival].kv_heads))

    def _due(self, stage: Stage) -> tuple[int, ...]:
        return stage.releases if self.s.sum_kv_gradients else stage.arrivals

    def _send_back(self, stage: Stage) -> None:
        """AttentionHalf._send_back."""
        ledger, s = self.ledger, self.s
        if len(stage.segments[0]) > 1:
            ledger.moment(dq=s.mine(stage.q_heads))
        heads_to_seq(ledger, s, "dq", stage.q_heads)
        for arrival in self._due(stage):
            self.summed.pop(arrival)
            for _ in range(2):
                heads_to_seq(ledger, s, "dk and dv", self.stages[arrival].kv_heads)

    def _finish(self, stage: Stage) -> None:
        """What AttentionHalf._send_back leaves to do: into the gradient of the normed input, first dq, then
        dk and dv of one arrival after the other."""
        ledger, s = self.ledger, self.s
        seq_arrives(ledger, s, "dq", stage.q_heads)
        query_backward(ledger, s, stage.q_heads, self.weights)
        for arrival in self._due(stage):
            heads = self.stages[arrival].kv_heads
            for _ in range(2):
                seq_arrives(ledger, s, "dk and dv", heads)
            key_value_backward(ledger, s, heads, self.weights)


# -- shared by both


def _inputs_of(ledger: Ledger, s: Sizes, stage: Stage) -> None:
    """AttentionHalf._inputs_of: "q", and before it "k and v" if they arrive with the stage."""
    if any(stage.kv_heads):
        project_key_value(ledger, s, stage)
    project_query(ledger, s, stage)


def _arrive(ledger: Ledger, s: Sizes, stage: Stage) -> None:
    """AttentionHalf._arrive."""
    if any(stage.kv_heads):
        for _ in range(2):
            heads_arrive(ledger, s, "k and v", stage.kv_heads)
    heads_arrive(ledger, s, "q", stage.q_heads)
