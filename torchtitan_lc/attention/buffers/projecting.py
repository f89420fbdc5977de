"""What the projections of a stage hold, forward and backward."""

from __future__ import annotations

from torchtitan_lc.attention.buffers.comm import seq_to_heads
from torchtitan_lc.attention.buffers.sizes import Sizes
from torchtitan_lc.attention.heads import Heads, Stage
from torchtitan_lc.tools.ledger import Ledger

# -- forward


def hold_normed_input(ledger: Ledger, s: Sizes) -> None:
    """TiledProjections._normed: "normed input", where it is held."""
    if s.hold_normed_input:
        ledger.take("normed input", s.hidden)
        ledger.moment(projection_tile=s.tiles.norm)


def project_query(ledger: Ledger, s: Sizes, stage: Stage) -> None:
    """TiledProjections.project_query: "q", packed and sent."""
    ledger.take("q", s.packed(stage.q_heads))
    ledger.moment(projection_tile=s.tiles.query)
    seq_to_heads(ledger, s, "q", stage.q_heads)


def project_key_value(ledger: Ledger, s: Sizes, stage: Stage) -> None:
    """TiledProjections.project_key_value: "k and v", packed and then sent one after the other."""
    ledger.take("k and v", 2 * s.packed(stage.kv_heads))
    ledger.moment(projection_tile=s.tiles.key_value)
    for _ in range(2):
        seq_to_heads(ledger, s, "k and v", stage.kv_heads)


def add_outputs(ledger: Ledger, s: Sizes) -> None:
    """TiledProjections.add_outputs: "h1" from h and the kept out: the end of forward, and all of a
    recomputation that kept it."""
    ledger.take("h1", s.hidden)
    ledger.moment(projection_tile=s.tiles.output)


# -- backward


class WeightGradients:
    """BoundProjection.add_grads and results (bound.py): sums in fp32, each made when the first stage's
    gradients come, and rounded at the end."""

    def __init__(self, ledger: Ledger, s: Sizes) -> None:
        self.ledger, self.s = ledger, s
        sizes = [elements * s.wide for elements in s.weights]
        self.to_come = dict(zip(("query", "key_value", "output"), sizes, strict=True))

    def add(self, projection: str) -> None:
        self.ledger.take("weight gradients", self.to_come.pop(projection, 0))

    def results(self) -> None:
        elements = sum(self.s.weights)
        self.ledger.take("weight gradients", elements * self.s.itemsize)
        self.ledger.free("weight gradients", elements * self.s.wide)


def output_backward(ledger: Ledger, s: Sizes, stage: Stage, weights: WeightGradients) -> None:
    """TiledProjections.output_backward: "dout", packed."""
    ledger.take("dout", s.packed(stage.q_heads))
    ledger.moment(projection_tile=s.tiles.output_backward)
    weights.add("output")


def query_backward(
    ledger: Ledger, s: Sizes, heads: tuple[Heads, ...], weights: WeightGradients
) -> None:
    """TiledProjections.projection_backward of "dq", packed."""
    ledger.moment(projection_tile=s.tiles.query_backward)
    weights.add("query")
    ledger.free("dq", s.packed(heads))


def key_value_backward(
    ledger: Ledger, s: Sizes, heads: tuple[Heads, ...], weights: WeightGradients
) -> None:
    """TiledProjections.projection_backward of "dk and dv" of one arrival, packed."""
    ledger.moment(projection_tile=s.tiles.key_value_backward)
    weights.add("key_value")
    ledger.free("dk and dv", 2 * s.packed(heads))


def norm_backward(ledger: Ledger, s: Sizes) -> None:
    """TiledProjections.norm_backward, written over "dx"."""
    ledger.moment(projection_tile=s.tiles.norm_backward)
