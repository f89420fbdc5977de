"""What a dry run makes of a config: every key of [dry_run] does something, and "auto" is the planned
machine's."""

from __future__ import annotations

from typing import Any

import pytest

from torchtitan_lc.attention.kernels.stand_in import StandIn
from torchtitan_lc.config import names
from torchtitan_lc.config.job_config import Checkpoint, JobConfig, Metrics
from torchtitan_lc.dry_run import job as dry_job
from torchtitan_lc.dry_run.compare import OF_ATTENTION, OF_PEERS, planned_figures
from torchtitan_lc.dry_run.job import ALLOCATORS, DryJob, alone, make_dry_job
from torchtitan_lc.plan.hardware import GIB
from torchtitan_lc.plan.terms import OWNERS
from torchtitan_lc.plan.timing import PARTS
from torchtitan_lc.tools.errors import UserError


def config(settings: dict[str, Any]) -> JobConfig:
    made = JobConfig()
    for key, value in {"parallelism.context_parallel_degree": 8, **settings}.items():
        names.set_key(made, key, value)
    return made


def dry(settings: dict[str, Any], device: str = "cpu") -> DryJob:
    return make_dry_job(config(settings), device)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU of 139.8 GiB, as far as a dry run asks before it runs."""
    monkeypatch.setattr(dry_job, "device_memory", lambda kind: int(139.8 * GIB))
    monkeypatch.setattr(dry_job, "device_name", lambda kind: "a GPU")
    monkeypatch.setattr(dry_job, "check_job", lambda *job, **more: None)


STAND_IN = {"dry_run.kernel": "stand_in"}
LARGE = {**STAND_IN, "model.flavor": "8B", "training.seq_len": 5 * 2**20}


def test_the_job_is_one_process_that_saves_nothing() -> None:
    before = config({"checkpoint.enable": True, "metrics.enable_tensorboard": True})
    made = alone(before)
    assert made.checkpoint == Checkpoint() and made.metrics == Metrics()
    assert not made.attention.self_check and not made.training.isolate_documents
    assert before.checkpoint.enable and before.attention.self_check, "a copy"


def test_auto_is_what_the_planned_machine_decides(gpu: None) -> None:
    long = dry({**LARGE, "activation_offload.enable": True}, "cuda")
    attention = long.config.attention
    assert (attention.hold_normed_input, attention.sum_kv_gradients) == (False, False)
    assert long.config.activation_offload.early_fetch is False
    roomy = dry({**LARGE, "plan.hardware": "b300_288gb", "training.seq_len": 2**20}, "cuda")
    assert roomy.config.attention.hold_normed_input is True
    assert long.config.parallelism.context_parallel_ulysses_degree == 8
    host = long.plan.job.host_budget
    assert host > 0
    assert long.config.activation_offload.host_memory_gib == pytest.approx(host / GIB)


def test_a_limit_stands_for_a_gpu_with_so_much_memory(gpu: None) -> None:
    auto = dry(LARGE, "cuda")
    beside = sum(t.size for t in auto.plan.reserve.terms if t.name != ALLOCATORS)
    assert auto.limit == int(79.1 * GIB) - beside
    smaller = dry({**LARGE, "dry_run.memory_limit_gib": 40.0}, "cuda")
    assert smaller.limit == 40 * GIB - beside
    assert smaller.plan.job.cluster.hardware.memory_gib == 40
    here = dry({**LARGE, "plan.hardware": "b300_288gb"}, "cuda")
    assert here.limit < int(139.8 * GIB) and "this GPU" in " ".join(here.notes)
    with pytest.raises(UserError, match=r"memory_limit_gib = 200.0: this GPU has 139.8 GiB"):
        dry({**LARGE, "dry_run.memory_limit_gib": 200.0}, "cuda")


@pytest.mark.parametrize("share", [True, False])
def test_host_buffers_are_shared_if_asked(share: bool, gpu: None) -> None:
    settings = {**LARGE, "activation_offload.enable": True, "dry_run.share_host_buffers": share}
    made = dry(settings, "cuda")
    assert made.config.debug.share_offload_buffers is share
    assert any("share their host buffers" in note for note in made.notes) is share


def test_the_kernel_is_the_jobs_or_a_stand_in() -> None:
    assert dry({}).kernel.kernel.name in ("cpu", "math")
    made = dry({**STAND_IN, "attention.kernel": "fa4"})
    assert isinstance(made.kernel.kernel, StandIn) and made.stands_in
    assert made.config.attention.kernel == "auto", "the job's need not be here"


def test_steps_of_the_key_are_run() -> None:
    assert dry({"dry_run.steps": 3}).config.dry_run.steps == 3


def test_large_jobs_have_fake_tensors_on_a_cpu_and_real_ones_on_a_gpu(gpu: None) -> None:
    assert dry(LARGE).fake and not dry({}).fake
    assert not dry(LARGE, "cuda").fake


def test_names_that_the_comparison_leaves_out_are_the_plans() -> None:
    for name in (*OF_PEERS, *OF_ATTENTION):
        assert any(part.startswith(name) for part in PARTS), name
    assert ALLOCATORS in OWNERS


def test_each_phase_has_its_own_moments_of_the_plan() -> None:
    made = dry(LARGE)
    figures = planned_figures(made.plan, stand_in=True)
    phases = [figures[f"peak, {phase}"] for phase in ("forward", "backward", "optimizer")]
    assert all(phases) and len(set(phases)) == 3
    assert max(phases) == figures["peak allocated"]
    all_of_it = planned_figures(made.plan, stand_in=False)["step"]
    parts = made.plan.time.parts
    attention = sum(s for part, s in parts.items() if part.startswith(OF_ATTENTION))
    peers = sum(s for part, s in parts.items() if part.startswith(OF_PEERS))
    assert figures["step"] == pytest.approx(all_of_it - attention)
    assert all_of_it == pytest.approx(made.plan.time.seconds - peers)
