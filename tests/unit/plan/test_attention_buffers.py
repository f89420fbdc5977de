"""The plan's account of a block against the block itself, byte for byte on the meta device.

Real code, shapes and frees of Llama 3 8B and relatives in bf16 with its weights' gradients, as rank 0 of
several. A change of what the code holds breaks these unless attention/buffers/ follows.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from tests.unit.plan.on_meta import (
    NO_COPIES,
    Elsewhere,
    Peaks,
    measure,
    no_peers,
    run_blocks,
)
from torchtitan_lc.attention.base import Peers
from torchtitan_lc.attention.kernels.stand_in import StandIn
from torchtitan_lc.attention.strategies import make_strategy
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.memory.checkpointing import checkpoint_block, checkpoint_segment
from torchtitan_lc.memory.offload import Offload
from torchtitan_lc.memory.placement import LayerPlacement
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.models.llama3 import FLAVORS
from torchtitan_lc.plan.activations import Activations
from torchtitan_lc.plan.fused import fused
from torchtitan_lc.plan.hardware import TABLE, Cluster
from torchtitan_lc.plan.job import Job, PlannedModel, make_job
from torchtitan_lc.plan.meta import built_on_meta
from torchtitan_lc.plan.moments import layer_moments
from torchtitan_lc.plan.state import Sharded
from torchtitan_lc.plan.terms import Moment

__all__ = ["no_peers"]

LLAMA = dataclasses.replace(FLAVORS["8B"], n_layers=1, vocab_size=256)
NORMED = dataclasses.replace(LLAMA, qk_norm=True)
ODD = DecoderArgs(3584, 1, 28, 4, 18_944, 256, head_dim=128)  # Qwen 2.5 7B's heads
SEVEN = DecoderArgs(896, 1, 14, 2, 4864, 256, head_dim=64)
ONE_KV = DecoderArgs(2048, 1, 16, 1, 5632, 256, head_dim=128)


def job(args: DecoderArgs, ranks: int, settings: dict[str, Any]) -> Job:
    config = JobConfig()
    config.training.seq_len = 2**19
    config.tiling.mlp_tokens = 8192
    config.parallelism.context_parallel_degree = ranks
    config.attention.kernel = "fa4"
    config.attention.hold_normed_input = False
    config.attention.sum_kv_gradients = False
    config.attention.overlap_exchange = False
    config.activation_checkpoint.selective_layers = 1
    for key, value in settings.items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    model = PlannedModel("test", args, built_on_meta(lambda: Decoder(args)))
    cluster = Cluster(TABLE["h200_141gb"], 1, ranks)
    made = make_job(config, model, cluster)
    return dataclasses.replace(made, kernel="stand-in")


def measured(planned: Job) -> Peaks:
    """The block of the job, run."""
    config, args = planned.config, planned.model.args
    model = built_on_meta(lambda: Decoder(args)).to(torch.bfloat16)
    model.execution.strategy = make_strategy(
        planned.strategy,
        StandIn(),
        ulysses=Peers(planned.ulysses, 0),
        ring=Peers(planned.ring, planned.ring - 1, object()),  # type: ignore[arg-type]
        heads_per_stage=config.attention.heads_per_stage,
        tile_tokens=config.tiling.projection_tokens,
        hold_normed_input=planned.hold_normed_input,
        sum_kv_gradients=planned.sum_kv_gradients,
        overlap_exchange=planned.overlap_exchange,
    )
    model.execution.mlp_tokens = config.tiling.mlp_tokens
    if config.compile.enable:
        model.functions.wrap(fused)  # as `Functions.compile` does
    offload = Offload(Elsewhere(torch.device("meta")), NO_COPIES, early=planned.early_fetch)
    for i, (block, place) in enumerate(zip(model.blocks, planned.layers, strict=True)):
        store = (partial(offload.block_store, place),) if planned.offload else ()
        block.checkpoint = checkpoint_block(place.mode, *store)
        if config.activation_checkpoint.block_inputs_every > 1 and place.keeps_input:
            of_segment = (partial(offload.segment_store, place),) if planned.offload else ()
            model.segments[i] = checkpoint_segment(*of_segment)
    return measure(
        partial(run_blocks, model),
        planned.rows,
        planned.tokens,
        args.dim,
        args.head_dim,
    )


def planned_peaks_of_one_block(planned: Job) -> Peaks:
    activations = Activations(planned)
    layer = planned.layers[0]
    block = activations.block(layer)
    kept = planned.hidden + (0 if layer.mode == "full" else planned.outputs)
    if layer.mode == "none":
        kept += planned.hidden
    backward = max(sum(block.mlp_backward.values()), sum(block.attention_backward.values()))
    return Peaks(sum(block.forward.values()), kept, backward)


CASES: list[tuple[str, DecoderArgs, int, dict[str, Any]]] = [
    ("upipe", LLAMA, 8, {}),
    ("upipe, two heads", LLAMA, 8, {"attention.heads_per_stage": 2}),
    ("upipe, two heads, one at a time", LLAMA, 8, {"attention.heads_per_stage": 2,
                                                   "training.seq_len": 2**21}),
    ("upipe, three of four heads", LLAMA, 8, {"attention.heads_per_stage": 3}),
    ("upipe, full", LLAMA, 8, {"activation_checkpoint.mode": "full"}),
    ("upipe, none", LLAMA, 8, {"activation_checkpoint.mode": "none"}),
    ("upipe, held input", LLAMA, 8, {"attention.hold_normed_input": True}),
    ("upipe, summed gradients", LLAMA, 8, {"attention.sum_kv_gradients": True}),
    ("upipe, two rows", LLAMA, 8, {"training.local_batch_size": 2, "training.seq_len": 2**18}),
    ("upipe, short", LLAMA, 8, {"training.seq_len": 2**17}),
    ("upipe, small tiles", LLAMA, 8, {"tiling.mlp_tokens": 4096, "tiling.projection_tokens": 4096}),
    ("upipe on two ranks", LLAMA, 2, {"training.seq_len": 2**18}),
    ("ulysses", LLAMA, 8, {"attention.strategy": "ulysses"}),
    ("ulysses, long", LLAMA, 8, {"attention.strategy": "ulysses", "training.seq_len": 2**20}),
    ("local", LLAMA, 1, {"training.seq_len": 2**17}),
    ("odd heads, upipe", ODD, 8, {"parallelism.context_parallel_ulysses_degree": 8}),
    ("odd heads, ulysses", ODD, 8, {"attention.strategy": "ulysses",
                                    "parallelism.context_parallel_ulysses_degree": 8}),
    ("14 heads on 4", SEVEN, 4, {"parallelism.context_parallel_ulysses_degree": 4}),
    ("one KV head", ONE_KV, 8, {}),
    ("one KV head, summed", ONE_KV, 8, {"attention.sum_kv_gradients": True}),
    ("ring", LLAMA, 8, {"attention.strategy": "ring"}),
    ("usp", LLAMA, 8, {"attention.strategy": "ulysses",
                       "parallelism.context_parallel_ulysses_degree": 4}),
    ("upipe, overlap", LLAMA, 8, {"attention.overlap_exchange": True}),
    ("upipe, overlap, summed", LLAMA, 8, {"attention.overlap_exchange": True,
                                          "attention.sum_kv_gradients": True}),
    ("upipe, overlap, two rows", LLAMA, 8, {"training.local_batch_size": 2, "training.seq_len": 2**18,
                                            "attention.overlap_exchange": True}),
    ("upipe, overlap, none", LLAMA, 8, {"attention.overlap_exchange": True,
                                        "activation_checkpoint.mode": "none"}),
    ("upipe around a ring", LLAMA, 8, {"parallelism.context_parallel_ulysses_degree": 2}),
    ("upipe, compiled", LLAMA, 8, {"compile.enable": True}),
    ("upipe, held input, compiled", LLAMA, 8, {"compile.enable": True,
                                               "attention.hold_normed_input": True}),
    ("ulysses, compiled", LLAMA, 8, {"compile.enable": True, "attention.strategy": "ulysses"}),
    ("local, compiled", LLAMA, 1, {"compile.enable": True, "training.seq_len": 2**17}),
    ("upipe, two rows, held input, compiled", NORMED, 8, {
        "training.local_batch_size": 2, "training.seq_len": 2**18, "compile.enable": True,
        "tiling.mlp_tokens": 1024, "attention.hold_normed_input": True, "attention.sum_kv_gradients": True,
        "attention.overlap_exchange": True}),
    ("upipe, four heads, overlap, compiled", LLAMA, 8, {"compile.enable": True,
                                                        "attention.heads_per_stage": 4,
                                                        "attention.overlap_exchange": True}),
    ("32 ranks, small MLP tiles, compiled", LLAMA, 32, {"compile.enable": True,
                                                        "tiling.mlp_tokens": 1024,
                                                        "training.seq_len": 2**21}),
    ("odd heads, compiled", ODD, 8, {"compile.enable": True,
                                     "parallelism.context_parallel_ulysses_degree": 8}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "ranks", "settings"), CASES, ids=[c[0] for c in CASES])
def test_a_block_holds_what_the_plan_says(
    name: str, args: DecoderArgs, ranks: int, settings: dict[str, Any], no_peers: None
) -> None:
    made = job(args, ranks, settings)
    got, want = measured(made), planned_peaks_of_one_block(made)
    for what in ("forward", "kept", "backward"):
        real, plan = getattr(got, what), getattr(want, what)
        b = made.hidden
        assert -0.01 <= plan / real - 1 <= 0.03, f"{what}: {real / b:.3f} B, planned {plan / b:.3f}"


def test_compiled_projections_hold_products_and_results_alone() -> None:
    settings = {
        "attention.heads_per_stage": 4,
        "attention.hold_normed_input": True,
        "training.seq_len": 2**17,
    }
    written, made = (job(LLAMA, 8, {**settings, "compile.enable": c}) for c in (False, True))
    costs, plain = (Activations(j).projection_costs for j in (made, written))
    q = made.hidden  # a tile is all tokens of a rank, a stage all heads
    assert costs.norm.peak == q
    assert costs.query.peak == 2 * q
    # The output, which nobody reads, its gradient, that of the product.
    assert costs.query_backward.peak == 3 * q
    assert plain.query.peak > 2 * q and plain.query_backward.peak > 3 * q
    assert dataclasses.replace(costs.query, peak=0) == dataclasses.replace(plain.query, peak=0)


def planned_peaks(planned: Job) -> tuple[int, int]:
    """Of all blocks' forward and backward, without what FSDP2 and the rest of the model hold."""
    state = Sharded(planned)
    moments = layer_moments(planned, Activations(planned), state)
    others = {*state.in_backward(1), "parameters", "Adam moments", "batch", "rope"}
    others -= {"weight gradients"}

    def fullest(chosen: list[Moment]) -> int:
        return max(sum(t.size for t in m.terms if t.name not in others) for m in chosen)

    return fullest(moments.forward), fullest([*moments.making, *moments.mlp, *moments.attention])


KEPT: list[tuple[str, dict[str, Any]]] = [
    ("as it is", {}),
    ("early", {"activation_offload.early_fetch": True}),
    ("full", {"activation_checkpoint.mode": "full"}),
    ("full, early", {"activation_checkpoint.mode": "full", "activation_offload.early_fetch": True}),
    ("one of three selective", {"activation_checkpoint.selective_layers": 1}),
    ("summed gradients", {"attention.sum_kv_gradients": True}),
    ("overlap", {"attention.overlap_exchange": True}),
    ("overlap, early", {"attention.overlap_exchange": True, "activation_offload.early_fetch": True}),
    ("every second input", {"activation_checkpoint.block_inputs_every": 2}),
    ("every second input, early", {"activation_checkpoint.block_inputs_every": 2,
                                   "activation_offload.early_fetch": True}),
    ("every third input", {"activation_checkpoint.block_inputs_every": 3}),
    ("every second input, full", {"activation_checkpoint.block_inputs_every": 2,
                                  "activation_checkpoint.mode": "full"}),
    ("on the GPU", {"activation_offload.enable": False}),
    ("on the GPU, overlap", {"activation_offload.enable": False, "attention.overlap_exchange": True}),
    ("every second input, on the GPU", {"activation_offload.enable": False,
                                        "activation_checkpoint.block_inputs_every": 2}),
    ("every second input, full, on the GPU", {"activation_offload.enable": False,
                                              "activation_checkpoint.mode": "full",
                                              "activation_checkpoint.block_inputs_every": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings"), KEPT, ids=[name for name, _ in KEPT])
def test_several_blocks_hold_what_the_plan_says_wherever_it_lies(
    name: str, settings: dict[str, Any], no_peers: None
) -> None:
    """Block inputs and outputs in host memory, on the GPU, or made again."""
    offloaded = {
        "activation_offload.enable": True,
        "activation_offload.host_memory_gib": 1000.0,
        "activation_offload.early_fetch": False,
        "activation_checkpoint.selective_layers": "auto",
        "tiling.projection_tokens": 16384,
    }
    made = job(dataclasses.replace(LLAMA, n_layers=3), 8, {**offloaded, **settings})
    got, b = measured(made), made.hidden
    for what, real, plan in zip(
        ("forward", "backward"), (got.forward, got.backward), planned_peaks(made), strict=True
    ):
        assert -0.01 <= plan / real - 1 <= 0.03, f"{what}: {real / b:.3f} B, planned {plan / b:.3f}"


def test_placements_of_one_layer_are_those_of_the_modes() -> None:
    assert job(LLAMA, 8, {}).layers[0] == LayerPlacement("selective")
