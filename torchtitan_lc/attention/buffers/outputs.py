"""What attention's outputs hold, wherever they are kept, until backward has used them up."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_lc.attention.buffers.sizes import Sizes
from torchtitan_lc.tools.ledger import Ledger


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


def kept(s: Sizes) -> int:
    """out and log-sum-exp of all stages: what `selective` keeps for a layer."""
    return sum(s.outputs(index) for index in range(len(s.plan.stages)))


def await_backward(ledger: Ledger, s: Sizes, kept: Kept) -> None:
    """Outputs.await_backward: what has been read for h1 leaves, but for the first stage's, until its stage
    comes."""
    if kept.on_host and not kept.early:
        for index in range(1, len(s.plan.stages)):
            ledger.free("attention output", s.outputs(index))


class Outputs:
    """Outputs in backward: "attention output", and what is fetched "ahead" for the next layer.

    taken: stages whose outputs have been read from where they were kept; on_device: those whose outputs
    are on the GPU.
    """

    def __init__(self, ledger: Ledger, s: Sizes, kept: Kept) -> None:
        self.ledger, self.s, self.kept = ledger, s, kept
        self.taken, self.stages = 0, len(s.plan.stages)
        self.on_device = {
            index for index in range(self.stages) if index == 0 or kept.early or not kept.on_host
        }

    def take(self) -> None:
        self._fetch_stage()
        self.taken += 1

    def free(self, size: int) -> None:
        """What has been taken, out or log-sum-exp of a stage, is needed no more."""
        if not self.kept.held_by_graph:
            self.ledger.free("attention output", size)

    def before_kernel(self) -> None:
        if not self.kept.early:
            return
        if self.taken < self.stages:
            self._fetch_stage()
        else:
            self._fetch_ahead()

    def after_kernel(self) -> None:
        if self.taken < self.stages and not self.kept.early:
            self._fetch_stage()

    def after_stages(self) -> None:
        if not self.kept.early:
            self._fetch_ahead()

    def _fetch_stage(self) -> None:
        if self.taken not in self.on_device:
            self.on_device.add(self.taken)
            self.ledger.take("attention output", self.s.outputs(self.taken))

    def _fetch_ahead(self) -> None:
        if "ahead" not in self.ledger.now:
            self.ledger.take("ahead", self.kept.ahead)
