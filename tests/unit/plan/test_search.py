"""What a search finds against every plan that it could have made, and what it writes."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from tests.unit.plan.jobs import cluster, config, model
from torchtitan_lc.config.manager import load_config
from torchtitan_lc.launch import main
from torchtitan_lc.plan import found
from torchtitan_lc.plan.changes import Settings, changed
from torchtitan_lc.plan.found import as_toml
from torchtitan_lc.plan.planner import Plan, make_plan
from torchtitan_lc.plan.report import warnings
from torchtitan_lc.plan.search import KEPT, MEASURES, STEP, fastest, longest, spreads

UPIPE: Settings = {
    "attention.strategy": "upipe",
    "attention.heads_per_stage": 1,
    "parallelism.context_parallel_degree": 8,
    "parallelism.context_parallel_ulysses_degree": 8,
}


def test_no_plan_of_all_that_are_tried_is_faster_and_fits() -> None:
    job, of_model = config({"training.seq_len": 5 * 2**20}), model("llama3", "8B")
    machine = cluster()
    found = fastest(job, of_model, machine, [UPIPE])
    assert found is not None and found.fits
    best = 0.0
    for kept, *measures in product(KEPT, *MEASURES):
        settings = {**UPIPE, **kept}
        for measure in measures:
            settings |= measure
        plan = make_plan(changed(job, settings), of_model, machine)
        best = max(best, plan.tokens_per_second if plan.fits else 0.0)
    assert found.tokens_per_second == best


def test_all_splits_and_strategies_are_tried() -> None:
    tried = list(spreads(config({}), model("llama3", "8B"), cluster()))
    key = "parallelism.context_parallel_ulysses_degree"
    assert {
        (s["attention.strategy"], s[key], s.get("attention.heads_per_stage")) for s in tried
    } == {
        ("ring", 1, None),
        *(("ulysses", u, None) for u in (2, 4, 8)),
        *(("upipe", 2, n) for n in (1, 2, 4, 8)),
        *(("upipe", 4, n) for n in (1, 2, 4)),
        *(("upipe", 8, n) for n in (1, 2)),
    }


def test_the_longest_row_fits_and_one_step_more_does_not() -> None:
    job = config({"model.flavor": "1B", "parallelism.context_parallel_degree": 1})
    of_model, machine = model("llama3", "1B"), cluster(gpus=1)
    plan = longest(job, of_model, machine)
    assert plan is not None and plan.fits
    length = plan.job.config.training.seq_len
    assert length % STEP == 0 and length > 2**20
    assert fastest(changed(job, {"training.seq_len": length + STEP}), of_model, machine) is None


def test_what_fits_nowhere_is_none() -> None:
    job = config({"training.seq_len": 2**27})
    assert fastest(job, model("llama3", "8B"), cluster(), [UPIPE]) is None


def _figures(plan: Plan) -> tuple[int, int, float]:
    return plan.gpu_bytes, plan.host.total, plan.time.seconds


def test_what_is_written_is_read_back_as_the_same_plan(tmp_path: Path) -> None:
    plan = fastest(config({"training.seq_len": 2**22}), model("llama3", "8B"), cluster(), [UPIPE])
    assert plan is not None
    path = tmp_path / "found.toml"
    path.write_text(as_toml(plan), encoding="utf-8")
    again = make_plan(load_config(["--config", str(path)]), model("llama3", "8B"), cluster())
    assert _figures(again) == _figures(plan)


def test_the_command_writes_both_configs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--job.dump_folder={tmp_path}", "--training.seq_len=4K", "--plan.hardware=cpu"]
    flags += ["--plan.gpus_per_node=2", "--training.mixed_precision_param=float32"]
    assert main(["--nproc_per_node", "1", "--", *flags, "--plan.search"]) == 0
    said = capsys.readouterr().out
    for name in ("plan_fastest.toml", "plan_longest.toml"):
        assert str(tmp_path / name) in said
        assert main(["--nproc_per_node", "1", "--", f"--config={tmp_path / name}", "--plan"]) == 0


def test_both_configs_are_written_before_anything_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*said: object) -> None:
        raise BrokenPipeError

    of_model, machine = model("llama3", "8B"), cluster()
    job = config({"training.seq_len": 2**20, "job.dump_folder": str(tmp_path)})
    plan = make_plan(job, of_model, machine)
    for found_by in ("fastest", "longest"):
        monkeypatch.setattr(found, found_by, lambda *asked: plan)
    monkeypatch.setattr("builtins.print", leave)
    with pytest.raises(BrokenPipeError):
        found.search(job, of_model, machine)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["plan_fastest.toml", "plan_longest.toml"]


def test_the_ladder_goes_down_and_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "ladder.png"
    flags = ["--model.flavor=8B", "--training.seq_len=3M", f"--plan.ladder={picture}"]
    assert main(["--nproc_per_node", "1", "--", *flags]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
    data = json.loads(picture.with_suffix(".json").read_text())
    sizes = [rung["gib"] for rung in data["ladder"]]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 100 * sizes[-1]
    for points in data["lengths"].values():
        assert [gib for _, gib in points] == sorted(gib for _, gib in points)


@pytest.mark.parametrize("name", ["ladder.foo", "ladder"])
def test_a_picture_of_no_known_kind_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / name
    flags = ["--model.flavor=8B", "--training.seq_len=3M", f"--plan.ladder={picture}"]
    assert main(["--nproc_per_node", "1", "--", *flags]) == 2
    said = capsys.readouterr().err
    assert f"plan.ladder = '{picture}'" in said and ".png" in said
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_for_long_rows_has_time_limits_that_its_layers_keep(tmp_path: Path) -> None:
    of_model, machine = model("llama3", "8B"), cluster()
    settings = {**UPIPE, "training.seq_len": 8 * 2**20, "activation_offload.enable": True}
    made = make_plan(config(settings), of_model, machine)
    assert len(warnings(made)) == 1, "the limit of the steps after the first is longer"
    path = tmp_path / "found.toml"
    path.write_text(as_toml(made), encoding="utf-8")
    again = make_plan(load_config(["--config", str(path)], quiet=True), of_model, machine)
    assert warnings(again) == [] and _figures(again) == _figures(made)
    assert "[comm]" not in as_toml(make_plan(config(UPIPE), of_model, machine)), (
        "nothing to say there"
    )
