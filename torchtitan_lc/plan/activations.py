"""What the activations of a step hold, moment by moment: the numbers of attention/buffers/ and of the
model's own tiles (tiles.py), put together as a block, checkpointing and offload run them.

    forward of a layer     h | attention half -> h1 | MLP half -> the next h
    loss                   final h and its gradient | a tile of logits, the head's gradients in fp32
    backward of a layer    replay -> h1 | MLP half | attention half
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from torchtitan_lc.attention import buffers
from torchtitan_lc.memory.placement import LayerPlacement
from torchtitan_lc.ops.tiled import sum_dtype
from torchtitan_lc.plan.job import Job
from torchtitan_lc.plan.tiles import (
    ProjectionCosts,
    TileShape,
    loss_costs,
    mlp_costs,
    projection_costs,
    rope_bytes,
)
from torchtitan_lc.tools.ledger import Ledger
from torchtitan_lc.tools.meter import Cost

# What is what in a report; the other names of the attention half stand for themselves.
_REPORTED = {
    "block input": "block inputs",
    "attention output": "attention outputs",
    "dh1": "gradient of h1",
    "dx": "gradient of the normed input",
    "dy": "gradient of the block's output",
    "ahead": "fetched ahead",
}


@dataclass(frozen=True)
class BlockPeaks:
    """Bytes by name at the fullest moment of a layer's forward, of its MLP half's backward and of its
    attention half's backward; the layer's own block input and outputs are among them."""

    forward: dict[str, int]
    mlp_backward: dict[str, int]
    attention_backward: dict[str, int]


class Activations:
    """Of one rank of a job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        block = job.model.module.blocks[0]
        self.projections = block.attention.projections(block.attention_norm.weight)
        self._peaks: dict[tuple[LayerPlacement, int], BlockPeaks] = {}

    # -- tiles

    @cached_property
    def projection_costs(self) -> ProjectionCosts:
        costs: ProjectionCosts = self.job.model.once(
            projection_costs,
            self.projections,
            self.job.heads,
            self._tile(self.job.config.tiling.projection_tokens),
            self.job.hold_normed_input,
            self.rope_bytes // sum_dtype(self.job.dtype).itemsize,
            self._fused,
        )
        return costs

    @cached_property
    def rope_bytes(self) -> int:
        """Of one token: what a decoder makes once per batch for the projections of all layers."""
        size: int = self.job.model.once(rope_bytes, self.job.model.module, self.job.dtype)
        return size

    @cached_property
    def mlp_costs(self) -> tuple[Cost, Cost]:
        module, tiling = self.job.model.module, self.job.config.tiling
        costs: tuple[Cost, Cost] = self.job.model.once(
            mlp_costs,
            module.functions.mlp_half,
            module.functions.gradients.mlp_half,
            self._mlp_weights,
            self._tile(tiling.mlp_tokens),
            self._fused,
        )
        return costs

    @cached_property
    def loss_costs(self) -> tuple[Cost, Cost]:
        module, tiling = self.job.model.module, self.job.config.tiling
        table = (module.head.output or module.tok_embeddings).weight
        costs: tuple[Cost, Cost] = self.job.model.once(
            loss_costs,
            module.functions.loss,
            (module.head.norm.weight, table),
            self._tile(tiling.loss_tokens),
            self._fused,
        )
        return costs

    @property
    def _fused(self) -> bool:
        """Other backends of torch.compile may keep every intermediate."""
        compiling = self.job.config.compile
        return compiling.enable and compiling.backend == "inductor"

    @property
    def _mlp_weights(self) -> tuple[Tensor, ...]:
        block = self.job.model.module.blocks[0]
        mlp = block.feed_forward
        return block.ffn_norm.weight, mlp.w1.weight, mlp.w2.weight, mlp.w3.weight

    def _tile(self, wanted: int) -> TileShape:
        tokens, count = self.job.tile(wanted)
        repeats = min(2, count)
        return TileShape(self.job.rows, tokens, self.job.model.args.dim, self.job.dtype, repeats)

    # -- one block

    @cached_property
    def attention(self) -> buffers.Sizes:
        job, args, p = self.job, self.job.model.args, self.projections
        weights = tuple(
            sum(w.tensor.numel() for w in part.weights) for part in (p.query, p.key_value, p.output)
        )
        assert len(weights) == 3
        return buffers.Sizes(
            plan=job.heads,
            rows=job.rows,
            tokens=job.tokens,
            width=args.dim,
            head_dim=args.head_dim,
            itemsize=job.itemsize,
            kernel=job.kernel,
            ring=job.ring,
            hold_normed_input=job.hold_normed_input,
            sum_kv_gradients=job.sum_kv_gradients,
            overlap_exchange=job.overlap_exchange,
            tiles=self.projection_costs.tiles(),
            weights=weights,
        )

    def block(self, layer: LayerPlacement, ahead: int = 0) -> BlockPeaks:
        """ahead: bytes that backward fetches for the layer before."""
        key = (layer, ahead)
        if key not in self._peaks:
            self._peaks[key] = self._block(layer, ahead)
        return self._peaks[key]

    def _block(self, layer: LayerPlacement, ahead: int) -> BlockPeaks:
        s, hidden = self.attention, self.job.hidden
        mlp_forward, mlp_backward = self.mlp_costs

        ledger = Ledger({"block input": hidden})
        buffers.forward(ledger, s)
        if layer.mode == "full":
            ledger.free("attention output")
        ledger.moment(block_output=hidden, MLP_tile=mlp_forward.peak)
        forward = ledger.peak

        kept = buffers.Kept(
            held_by_graph=layer.mode == "none",
            on_host=layer.outputs_on_host,
            early=self.job.early_fetch,
            ahead=ahead,
        )
        ledger = Ledger({"block input": hidden, "dy": hidden})
        if layer.mode == "full":
            buffers.forward(ledger, s)
        else:
            ledger.take("attention output", buffers.kept(s))
            buffers.add_outputs(ledger, s)
        buffers.await_backward(ledger, s, kept)
        if layer.mode == "none":
            ledger.take("dh1", hidden)
        ledger.moment(MLP_tile=mlp_backward.peak)
        mlp = ledger.peak

        now = {name: size for name, size in ledger.now.items() if name not in ("dy", "h1")}
        now["dh1"] = hidden  # of a recomputed h1 written over it: ops.tiled, gradient_over_input
        mlp_gradients = sum(w.numel() for w in self._mlp_weights) * self.job.itemsize
        ledger = Ledger({**now, "weight gradients": mlp_gradients})
        buffers.backward(ledger, s, kept)
        return BlockPeaks(*map(_reported, (forward, mlp, ledger.peak)))


def _reported(peak: dict[str, int]) -> dict[str, int]:
    return {_REPORTED.get(name, name): size for name, size in peak.items() if size}
