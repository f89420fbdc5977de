"""A decoder of the Llama family as a single-device model; parallelize.py spreads it over ranks.

    h = embed(tokens)
    for each block:   h = h + attention(norm(h));   h = h + mlp(norm(h))
    loss = cross_entropy(output(norm(h)), labels)

Modules hold the weights, functions.py the arithmetic, `Execution` says over which ranks and in which tiles
the blocks run, and each block's `checkpoint` what it keeps for backward. The defaults are one rank, one
tile and keeping everything, so the model runs as it stands on any device.

Letters: B rows, T tokens of this rank, M dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from torchtitan_lc.attention.base import Projection, Projections, Strategy, Weight
from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.attention.kernels import Math
from torchtitan_lc.attention.local import Local
from torchtitan_lc.distributed.init import normal_
from torchtitan_lc.memory.checkpointing import Run, checkpoint_block
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.functions import Functions
from torchtitan_lc.ops.loss import tiled_loss
from torchtitan_lc.ops.recompute import is_recomputed, output_is_unused
from torchtitan_lc.ops.tiled import tiled


@dataclass
class Execution:
    """How the blocks and the loss run; parallelize.py fills it in, the model only obeys.

    strategy: spreads attention over ranks and heads.
    mlp_tokens, loss_tokens: tokens per tile, 0 for all at once.
    after_attention, after_last_block: called with the hidden state, between the halves of every block and
        when the last one has run.
    """

    strategy: Strategy = field(default_factory=lambda: Local(Math()))
    mlp_tokens: int = 0
    loss_tokens: int = 0
    after_attention: Callable[[Tensor], None] = lambda h: None
    after_last_block: Callable[[Tensor], None] = lambda h: None


class Attention(nn.Module):
    """Grouped-query attention: its weights, and their description for a strategy."""

    def __init__(self, args: DecoderArgs, functions: Functions) -> None:
        super().__init__()
        self.args, self.functions = args, functions
        q_dim, kv_dim = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
        self.wq = nn.Linear(args.dim, q_dim, bias=args.qkv_bias)
        self.wk = nn.Linear(args.dim, kv_dim, bias=args.qkv_bias)
        self.wv = nn.Linear(args.dim, kv_dim, bias=args.qkv_bias)
        self.wo = nn.Linear(q_dim, args.dim, bias=False)
        self.q_norm = nn.RMSNorm(args.head_dim) if args.qk_norm else None
        self.k_norm = nn.RMSNorm(args.head_dim) if args.qk_norm else None

    def projections(self, norm_scale: Tensor) -> Projections:
        columns = 1  # of the output projection's weight are made of heads
        f = self.functions
        query = _of_heads(self.wq, self.q_norm)
        key, value = _of_heads(self.wk, self.k_norm), _of_heads(self.wv)
        return Projections(
            n_heads=self.args.n_heads,
            n_kv_heads=self.args.n_kv_heads,
            head_dim=self.args.head_dim,
            norm=Projection(f.norm, (Weight(norm_scale),)),
            query=Projection(f.query, query, products=f.products("query"), after=f.after_query),
            key_value=Projection(
                f.key_value,
                key + value,
                products=f.products("key_value"),
                after=f.after_key_value,
            ),
            output=Projection(f.output, (Weight(self.wo.weight, columns),), f.gradients.output),
            scale=1 / math.sqrt(self.args.head_dim),
        )


def _of_heads(linear: nn.Linear, norm: nn.RMSNorm | None = None) -> tuple[Weight, ...]:
    """What a projection to heads uses: rows and biases are made of heads, the norm of a head is shared."""
    weights = [Weight(linear.weight, head_axis=0)]
    if linear.bias is not None:
        weights.append(Weight(linear.bias, head_axis=0))
    if norm is not None:
        weights.append(Weight(norm.weight))
    return tuple(weights)


class FeedForward(nn.Module):
    """Weights of the gated MLP: w2(silu(w1 x) * w3 x)."""

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim, bias=False)
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=False)


class TransformerBlock(nn.Module):
    """h [B, T, M], rope's cosines and sines [B, T, D], documents of the whole rows -> [B, T, M].

    checkpoint runs the two halves and decides what is kept of this block for backward.
    """

    def __init__(self, args: DecoderArgs, functions: Functions, execution: Execution) -> None:
        super().__init__()
        self.functions, self.execution = functions, execution
        self.checkpoint = checkpoint_block("none")
        self.attention_norm = nn.RMSNorm(args.dim)
        self.attention = Attention(args, functions)
        self.ffn_norm = nn.RMSNorm(args.dim)
        self.feed_forward = FeedForward(args)

    def forward(self, h: Tensor, cos_sin: Tensor, documents: Documents | None) -> Tensor:
        return self.checkpoint(self._halves, h, cos_sin, documents)

    def _halves(self, h: Tensor, cos_sin: Tensor, documents: Documents | None) -> Tensor:
        projections = self.attention.projections(self.attention_norm.weight)
        h = self.execution.strategy.attend(h, cos_sin, projections, documents)
        self.execution.after_attention(h)
        mlp = self.feed_forward
        return tiled(
            self.functions.mlp_half,
            h,
            self.ffn_norm.weight,
            mlp.w1.weight,
            mlp.w2.weight,
            mlp.w3.weight,
            tile_tokens=self.execution.mlp_tokens,
            gradients=self.functions.gradients.mlp_half,
            skip_output=output_is_unused(),
            gradient_over_input=is_recomputed(),
        )


class Head(nn.Module):
    """Final norm, output projection and loss: one unit, so that the full logits never exist.

    A tied head has no table of its own: it is handed the embedding's, so there is no alias to lose when
    a model is built on the meta device, and one parameter collects both gradients.
    """

    def __init__(self, args: DecoderArgs, functions: Functions, execution: Execution) -> None:
        super().__init__()
        self.functions, self.execution = functions, execution
        self.norm = nn.RMSNorm(args.dim)
        self.output = (
            None if args.tie_embeddings else nn.Linear(args.dim, args.vocab_size, bias=False)
        )

    def forward(self, h: Tensor, labels: Tensor | None, tied_table: Tensor | None) -> Tensor:
        """Sum of the loss over live labels (a scalar); logits [B, T, V] when there are no labels."""
        table = tied_table if self.output is None else self.output.weight
        assert table is not None
        if labels is None:
            return self.functions.logits(h, self.norm.weight, table)
        return tiled_loss(
            self.functions.loss,
            h,
            labels,
            self.norm.weight,
            table,
            tile_tokens=self.execution.loss_tokens,
        )


class Decoder(nn.Module):
    """tokens, positions, labels [B, T] int64 of this rank -> summed loss over its live labels.

    positions count from the start of the token's document (of the whole row, when it is one),
    whichever part of it this rank holds; documents are those of the whole rows, None when each is one.
    functions_class: the arithmetic of its layers; a variant of the model may bring another.
    """

    functions_class = Functions

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__()
        self.args = args
        self.functions = self.functions_class(args)
        self.execution = Execution()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict(
            {
                str(i): TransformerBlock(args, self.functions, self.execution)
                for i in range(args.n_layers)
            }
        )
        self.head = Head(args, self.functions, self.execution)
        # By block: what runs the blocks that are checkpointed together, where they begin.
        self.segments: list[Run | None] = [None] * args.n_layers

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        labels: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        tied = self.tok_embeddings.weight if self.args.tie_embeddings else None
        h = self.tok_embeddings(tokens)
        wide = torch.promote_types(h.dtype, torch.float32)
        cos_sin = self.functions.rope.cos_sin(positions, wide)
        for start, stop in self._segments():
            segment = self.segments[start]
            if segment is not None:
                h = segment(partial(self._run_blocks, start, stop), h, cos_sin, documents)
                continue
            for block in self.blocks[start:stop]:  # here, where nothing else holds the first h
                h = block(h, cos_sin, documents)
        self.execution.after_last_block(h)
        return self.head(h, labels, tied)

    def _run_blocks(
        self, start: int, stop: int, h: Tensor, cos_sin: Tensor, documents: Documents | None
    ) -> Tensor:
        for block in self.blocks[start:stop]:
            h = block(h, cos_sin, documents)
        return h

    def _segments(self) -> list[tuple[int, int]]:
        """Blocks from one segment's beginning to the next; one segment where there are none."""
        starts = [i for i, segment in enumerate(self.segments) if segment is not None] or [0]
        return list(pairwise([*starts, len(self.segments)]))

    @property
    def blocks(self) -> list[TransformerBlock]:
        return [cast(TransformerBlock, block) for block in self.layers.values()]

    def init_weights(self, seed: int) -> None:
        """Initial values from ``seed`` alone, for whatever part of each parameter this rank holds.

        Norms start at 1, biases at 0, matrices normal with args.init_std, with three exceptions.
        Projections that write into the residual stream are scaled down by sqrt(2 L) (GPT-2), so that
        its variance does not grow with depth. The embedding starts at 1 (TorchTitan), so that the
        branches' first updates are small beside the stream they are added to. The output matrix
        starts at 1 / (4 sqrt(M)): logits of about 1/4, so that the first loss is that of a uniform
        guess. A tied table, being both, starts at 1 / sqrt(M).
        """
        residual = self.args.init_std / math.sqrt(2 * self.args.n_layers)
        tied = self.args.tie_embeddings
        special = {
            "tok_embeddings.weight": self.args.dim**-0.5 if tied else 1.0,
            "head.output.weight": self.args.dim**-0.5 / 4,
        }
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                start = nn.init.zeros_ if name.endswith(".bias") else nn.init.ones_
                start(parameter)
                continue
            writes_residual = name.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
            std = special.get(name, residual if writes_residual else self.args.init_std)
            normal_(parameter, name, seed=seed, std=std)
