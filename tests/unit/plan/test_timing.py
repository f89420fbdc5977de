"""Seconds against measured ones and against arithmetic."""

from __future__ import annotations

import pytest

from tests.unit.plan.jobs import cluster, config, model, plan
from torchtitan_lc.plan.activations import Activations
from torchtitan_lc.plan.job import make_job
from torchtitan_lc.plan.state import Sharded
from torchtitan_lc.plan.timing import Timer


@pytest.mark.parametrize(
    ("heads", "compiled", "seconds"),
    [(1, False, 0.649), (4, False, 0.642), (1, True, 0.601), (4, True, 0.588)],
)
def test_a_block_takes_what_was_measured_on_h200(
    heads: int, compiled: bool, seconds: float
) -> None:
    """8B, forward and backward, as rank 0 of 2 at 128K, flash-attn-4; peers took no time
    (block_8b_rank0of2_128k)."""
    settings = {
        "training.seq_len": 2**17,
        "parallelism.context_parallel_degree": 2,
        "attention.heads_per_stage": heads,
        "attention.hold_normed_input": True,
        "attention.overlap_exchange": False,
        "compile.enable": compiled,
    }
    job = make_job(config(settings), model("llama3", "8B"), cluster("h200_141gb", 2))
    parts = Timer(job, Activations(job), Sharded(job)).step().parts
    of_block = ("attention", "linear", "element-wise", "launches")
    planned = sum(s for name, s in parts.items() if name.startswith(of_block)) / 32
    assert planned == pytest.approx(seconds, rel=0.03)


def exchange_of(overlapped: bool, gpus: int = 8, **settings: object) -> float:
    keys = {
        "training.seq_len": 2**20,
        "attention.sum_kv_gradients": True,
        "attention.overlap_exchange": overlapped,
    }
    made = plan({**keys, **settings}, gpus=gpus)
    return made.time.parts["exchange, not hidden"]


def test_overlapped_exchanges_leave_what_no_projection_runs_beside() -> None:
    # In hidden-state buffers: forward q, k and v there and out back, backward q, out, its gradient, k and v
    # there and dq, dk and dv back. Of four stages those there in forward stay, and a fourth of the others.
    forward, back, backward, returned = 1.5, 1.0, 3.5, 1.5
    plain, hidden = exchange_of(False), exchange_of(True)
    left = forward + (back + backward + returned) / 4
    assert hidden / plain == pytest.approx(left / (forward + back + backward + returned))


def test_over_a_network_projections_hide_a_part_of_the_exchanges() -> None:
    across = {"parallelism.context_parallel_degree": 16, "gpus": 16}
    across["parallelism.context_parallel_ulysses_degree"] = 16
    plain, hidden = exchange_of(False, **across), exchange_of(True, **across)
    assert 0.5 < hidden / plain < 1


def test_a_ring_pays_for_its_sums() -> None:
    ring = plan({"training.seq_len": 2**20, "attention.strategy": "ring"}).time.parts["ring"]
    # Of one layer forward: 7 hops, 128K tokens x 4096 in fp32, at 0.85 of the memory's bandwidth.
    forward = 7 * 2**17 * 4096 * (8 + 6 + 12) / (0.85 * 3350e9)
    assert ring > 32 * forward
    assert plan({"training.seq_len": 2**20}).time.parts["ring"] == 0


def test_a_layer_made_again_runs_without_its_attention() -> None:
    settings = {"training.seq_len": 2**20, "activation_offload.enable": True}
    one = plan(settings).time.parts
    every = plan({**settings, "activation_checkpoint.block_inputs_every": 4}).time.parts
    assert every["attention recompute"] == one["attention recompute"] == 0
    again = every["linear recompute"] - one["linear recompute"]
    # 24 of 32 layers: MLP and output projection once more, at 620 TFLOP/s.
    flops = 24 * 2 * 2**17 * (3 * 4096 * 14336 + 4096 * 4096)
    assert again == pytest.approx(flops / 620e12, rel=0.01)


def test_overlapped_outputs_fetched_late_have_less_to_hide_behind() -> None:
    """They are needed before what returned is turned into gradients: on a B200 sooner than they come."""
    late = {
        "training.seq_len": 3 * 2**20,
        "activation_offload.enable": True,
        "activation_offload.early_fetch": False,
        "attention.hold_normed_input": True,
    }
    waited, overlapped = (
        plan({**late, "attention.overlap_exchange": overlap}, "b200_192gb").time.parts
        for overlap in (False, True)
    )
    assert overlapped["offload, not hidden"] > waited["offload, not hidden"]
