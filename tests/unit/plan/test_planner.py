"""What a plan says of whole jobs: against measured figures, against metrics.py, and of its proposals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.plan.jobs import cluster, config, model, plan
from torchtitan_lc.components.metrics import flops_per_token
from torchtitan_lc.config import names
from torchtitan_lc.config.manager import load_config
from torchtitan_lc.plan.changes import alternatives, cheapest
from torchtitan_lc.plan.hardware import GIB
from torchtitan_lc.plan.job import planned_model
from torchtitan_lc.plan.planner import Plan, make_plan
from torchtitan_lc.plan.report import report, verdict

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
BATCH = ("batch", "rope")
LONG = {"training.seq_len": 5 * 2**20, "activation_offload.enable": True}


def gib(plan: Plan, moment: str) -> float:
    return next(m.total for m in plan.moments if m.name.startswith(moment)) / GIB


def test_8b_over_8_ranks_holds_what_was_measured_on_h200() -> None:
    # Measured with FSDP2 on the fake process group, steps of 512 tokens: 11.3 GiB between steps, 15.0
    # with all gradients, 18.0 at the peak.
    made = plan({"training.seq_len": 512, "tiling.loss_tokens": 64})
    between = sum(t.size for t in made.moments[0].terms if t.name in ("parameters", "Adam moments"))
    assert between / GIB == pytest.approx(11.3, rel=0.01)
    assert gib(made, "optimizer") == pytest.approx(15.0, rel=0.01)
    assert made.peak.total / GIB == pytest.approx(18.0, rel=0.03)


@pytest.mark.parametrize(
    ("settings", "backward"),
    [
        # B of a whole block with its neighbours in host memory, as tests/unit/attention/test_block_memory.py
        # counts them on real tensors; log-sum-exp weighs a 128th of out here. Stages of several heads are
        # long enough for their groups to be split: flash-attn-4 sums dq in fp32 for one head at a time.
        ({}, 5.52),
        ({"attention.sum_kv_gradients": True}, 6.02),
        ({"attention.hold_normed_input": True}, 6.52),
        ({"attention.overlap_exchange": True}, 6.52),
        ({"attention.heads_per_stage": 2}, 7.27),
        ({"attention.strategy": "ulysses"}, 9.28),
    ],
)
def test_attention_backward_of_the_long_rows_in_hidden_state_buffers(
    settings: dict[str, object], backward: float
) -> None:
    lean = {
        "attention.hold_normed_input": False,
        "attention.sum_kv_gradients": False,
        "attention.overlap_exchange": False,
        "activation_offload.early_fetch": False,
    }
    made = plan({**LONG, **lean, **settings})
    moment = next(m for m in made.moments if m.name.endswith("attention half"))
    constant = {"parameters", "Adam moments", "gradients", "gathered weights", "reduce buffers"}
    own = sum(t.size for t in moment.terms if t.name not in {*constant, "weight gradients", *BATCH})
    assert own / made.job.hidden == pytest.approx(backward, abs=0.05)


@pytest.mark.parametrize("record", ["rank8_8b_128k", "rank8_8b_256k"])
def test_compiled_jobs_hold_what_was_measured_on_h200(record: str, tmp_path: Path) -> None:
    found = json.loads((RESULTS / f"{record}.json").read_text(encoding="utf-8"))
    (tmp_path / "job.toml").write_text(found["config"], encoding="utf-8")
    job = load_config(["--config", str(tmp_path / "job.toml")], quiet=True)
    assert job.compile.enable
    made = make_plan(job, planned_model(job), cluster("h200_141gb"))
    (case,) = found["cases"]
    assert -0.01 <= made.peak.total / GIB / case["allocated_gib"] - 1 <= 0.03


def test_compiling_changes_what_tiles_hold_and_only_inductor_does() -> None:
    job = {"training.seq_len": 2**17}
    plain, compiled, unfused = (
        plan({**job, **more})
        for more in (
            {},
            {"compile.enable": True},
            {"compile.enable": True, "compile.backend": "aot_eager"},
        )
    )
    assert unfused.moments == plain.moments
    tiles = {"loss tile and head gradients", "MLP tile", "projection tile"}
    for before, after in zip(plain.moments, compiled.moments, strict=True):
        assert after.total <= before.total
        assert after.total == before.total or tiles & {t.name for t in before.terms}
    assert gib(compiled, "loss") < gib(plain, "loss") - 3
    assert compiled.time.parts["linear forward"] == plain.time.parts["linear forward"]


def test_mfu_and_tokens_are_those_that_training_logs() -> None:
    made = plan({"training.seq_len": 2**17, "training.global_batch_size": 2})
    args = made.job.model.args
    n = made.n_parameters - args.vocab_size * args.dim
    full, causal = flops_per_token(n, args.n_layers, args.n_heads, args.head_dim, 2**17)
    tps = 2 * 2**17 / made.time.seconds / 8
    assert made.tokens_per_second == pytest.approx(tps)
    assert made.mfu(causal=False) == pytest.approx(100 * full * tps / 989e12)
    assert made.mfu(causal=True) == pytest.approx(100 * causal * tps / 989e12)
    assert made.mfu(causal=True) < 100


def test_full_runs_the_attention_forward_twice_and_selective_once() -> None:
    parts = {
        mode: plan({**LONG, "activation_checkpoint.mode": mode}, "h200_141gb").time.parts
        for mode in ("full", "selective")
    }
    assert parts["full"]["attention recompute"] == pytest.approx(parts["full"]["attention forward"])
    short = plan({"training.seq_len": 2**19}, "h200_141gb").time.parts
    assert short["attention recompute"] == 0


def test_attention_time_is_flop_over_the_measured_rate() -> None:
    made = plan({"training.seq_len": 2**20})
    flops = 32 * 2 * (2**20) ** 2 * 32 * 128 / 8  # layers, causal, heads x D, ranks
    assert made.time.parts["attention forward"] == pytest.approx(flops / 691e12)
    assert made.time.parts["attention backward"] == pytest.approx(2.5 * flops / 633e12)


def test_ranks_that_idle_set_the_pace() -> None:
    even = plan({"model.name": "qwen2", "model.flavor": "7B",
                 "parallelism.context_parallel_ulysses_degree": 4})  # fmt: skip
    idle = plan({"model.name": "qwen2", "model.flavor": "7B",
                 "parallelism.context_parallel_ulysses_degree": 8})  # fmt: skip
    # 28 heads on 8 ranks: some own 4, others 3
    ratio = idle.time.parts["attention forward"] / even.time.parts["attention forward"]
    assert ratio == pytest.approx(32 / 28)


def test_host_memory_is_counted_per_node_with_what_each_rank_keeps_there() -> None:
    made = plan({**LONG, "optimizer.offload_state": True})
    terms = {t.name: t.size for t in made.host.terms}
    assert terms["Adam moments"] == pytest.approx(2 * 4 * made.n_parameters, rel=0.001)
    kept = sum(layer.input_on_host for layer in made.job.layers)
    assert kept == 31
    assert terms["offloaded activations"] >= 8 * kept * made.job.hidden
    assert made.host_room >= 0  # "auto" takes no more than the node has


@pytest.mark.parametrize("settings", [{"training.seq_len": 2**20}, {"training.seq_len": 3 * 2**20}])
def test_each_proposed_change_makes_the_job_fit_and_its_price_is_the_plans(
    settings: dict[str, object],
) -> None:
    made = plan(settings)
    assert not made.fits
    of_job = (model("llama3", "8B"), cluster())
    enough = alternatives(made, *of_job)
    assert enough
    for change in enough[:2]:
        again = plan({**settings, **change.settings})
        assert again.fits
        assert again.gpu_bytes == change.after.gpu_bytes
        saved = (again.gpu_bytes - made.gpu_bytes) / GIB
        assert f"{saved:+.1f} GiB" in str(change)
    times = [change.after.time.seconds for change in enough]
    assert times == sorted(times)


def test_several_changes_are_proposed_where_one_is_not_enough() -> None:
    made = plan({"training.seq_len": 8 * 2**20, "attention.strategy": "ulysses"})
    of_job = (model("llama3", "8B"), cluster())
    assert alternatives(made, *of_job) == []
    steps = cheapest(made, *of_job)
    assert len(steps) > 1 and steps[-1].after.fits
    text = "\n".join(verdict(made, of_job[0]))
    assert "These together make it fit" in text


def test_what_fits_nowhere_is_said_so() -> None:
    made = plan({"training.seq_len": 2**30})
    assert "No change of settings makes it fit" in "\n".join(verdict(made, model("llama3", "8B")))


def test_the_report_names_terms_peak_parts_and_room() -> None:
    made = plan(LONG)
    text = report(made, model("llama3", "8B"))
    for word in (
        made.peak.name,
        "Adam moments",
        "gathered weights",
        "NCCL",
        "offloaded activations",
        "attention backward",
        "tokens/s per GPU",
        "causal",
        "hours for",
        "a checkpoint is 90 GiB",
        "It fits",
    ):
        assert word in text, word
    sizes = [term.size for term in made.peak.largest_first()]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == made.peak.total


def test_a_time_limit_below_a_layers_backward_is_pointed_out() -> None:
    assert "comm.init_timeout_seconds = 300 is less" in report(plan(LONG), model("llama3", "8B"))
    patient = {**LONG, "comm.init_timeout_seconds": 1200}
    assert "warning" not in report(plan(patient), model("llama3", "8B"))


@pytest.mark.parametrize("key", ["parameters", "Adam moments", "gradients"])
def test_state_on_the_host_is_not_on_the_gpu(key: str) -> None:
    made = plan({"training.seq_len": 2**17, "training.enable_cpu_offload": True})
    assert all(term.name != key for m in made.moments for term in m.terms)
    assert any(term.name == key and term.size for term in made.host.terms)


def test_a_plan_needs_no_more_than_the_config_and_the_cluster() -> None:
    made = config({"training.dataset": "jsonl", "training.dataset_path": "/not/here"})
    assert names.get_key(made, "training.dataset_path") == "/not/here"
    assert (
        plan({"training.dataset": "jsonl", "training.dataset_path": "/not/here"}).time.seconds > 0
    )


def test_page_locked_shards_are_counted_as_rounded_up_to_a_power_of_two() -> None:
    made = plan({"training.seq_len": 2**17, "training.enable_cpu_offload": True})
    terms = {t.name: t.size for t in made.host.terms}
    exact = 4 * made.n_parameters
    # 14336 rows of the MLP's matrices over 8 ranks are 1792, which torch rounds up to 2048.
    assert 1.1 * exact < terms["parameters"] < 2 * exact
    assert terms["gradients"] == terms["parameters"]
    assert terms["Adam moments"] == pytest.approx(2 * exact, rel=0.001)
