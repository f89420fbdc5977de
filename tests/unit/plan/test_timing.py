"""Seconds against measured ones and against arithmetic."""

from __future__ import annotations

import pytest

from benchmarks.host_time import planned_layer
from benchmarks.record import RESULTS, Record, read
from tests.unit.plan.jobs import cluster, config, model, plan
from torchtitan_lc.config.manager import load_config
from torchtitan_lc.plan.activations import Activations
from torchtitan_lc.plan.hardware import TABLE
from torchtitan_lc.plan.job import make_job, planned_model
from torchtitan_lc.plan.planner import make_plan
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


@pytest.mark.parametrize("part", ["lean_32K", "published_32K"])
def test_a_job_on_two_ranks_takes_what_was_measured_on_h200(part: str) -> None:
    """All 32 layers in 16 stages of few tokens each: there the time of an exchange beyond its bytes counts."""
    measured = read(RESULTS / "record_2xh200.json")["parts"][part]
    made = load_config(["--config=llama8b_1m.toml", *measured["flags"]], quiet=True)
    time = make_plan(made, planned_model(made), cluster("h200_141gb", 2)).time
    assert time.seconds == pytest.approx(measured["time_s"]["median"], rel=0.12)


@pytest.mark.parametrize(
    "case", read(RESULTS / "host_8b_h200.json")["cases"], ids=lambda c: c["case"]
)
def test_rows_too_short_for_the_gpu_take_what_was_measured_of_the_host(case: Record) -> None:
    record = read(RESULTS / "host_8b_h200.json")
    # With one compiled stage the guards of compiled functions weigh most.
    rel = 0.4 if case["case"] == "ulysses, compiled" else 0.2
    measured = case["seconds"]["forward"] + case["seconds"]["backward"]
    assert planned_layer(record, case) == pytest.approx(measured, rel=rel)


def test_the_host_is_waited_for_where_stages_are_many_and_short_and_not_at_long_rows() -> None:
    def waited(seq_len: int, heads: int) -> float:
        settings = {"training.seq_len": seq_len, "attention.heads_per_stage": heads}
        two = {"parallelism.context_parallel_degree": 2}
        return plan({**settings, **two}, "h200_141gb", gpus=2).time.parts["host, not hidden"]

    assert waited(2**13, 1) > 2 * waited(2**13, 4) > 0
    assert waited(2**18, 1) == 0


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
    # Of each of 32 layers 24 of heads, and those of the KV heads that arrive with the first stage.
    fixed = 32 * (24 + 6) * TABLE["h100_80gb"].exchange_us * 1e-6
    plain, hidden = exchange_of(False) - fixed, exchange_of(True) - fixed
    left = forward + (back + backward + returned) / 4
    assert hidden / plain == pytest.approx(left / (forward + back + backward + returned))
    assert exchange_of(True, **{"parallelism.context_parallel_degree": 1}) == 0


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
