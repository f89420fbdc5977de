"""A job's numbers as attention sees them, and the sizes of its buffers."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_lc.attention.heads import HeadPlan, Heads


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
