"""Headline figures come from result files, and from nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.summary import RULES, summarise

FACTS = {"commit": "c0ffee", "date": "2026-12-01", "time": "10:00:00", "device": "NVIDIA H200"}


def _spread(value: float) -> dict[str, float]:
    return {"median": value, "min": value, "max": value}


def _write(folder: Path, name: str, script: str, **fields: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps({**FACTS, "script": script, **fields}))


def _block(seconds: float, **fields: Any) -> dict[str, Any]:
    labels = {"kind": "ours", "strategy": "upipe:1", "mode": "selective", "kernel": "fa4"}
    common = {**labels, "compile": True, "offload": True, "seq_len": 256 * 1024}
    return {**common, "seconds": _spread(seconds), **fields}


def _two_ranks(folder: Path, cases: list[dict[str, Any]], **fields: Any) -> None:
    shared = {"ranks": 2, "layers": 1, "flavor": "8B", "peers": "real ranks", "cases": cases}
    _write(folder, fields.pop("name", "block"), "bench_block", **{**shared, **fields})


def _dry_run(mi_tokens: int, reserved_gib: float, moments: float = 1.0) -> dict[str, Any]:
    figures = {"peak reserved": reserved_gib * 2**30, "Adam moments": moments * 2**30}
    measured = {name: {"measured": value} for name, value in figures.items()}
    labels = {"model": "llama3 8B", "world": 8, "seq_len": mi_tokens << 20}
    return {**labels, "figures": measured, "fits": True, "limit": 77.6 * 2**30}


def test_without_results_there_is_no_figure(tmp_path: Path) -> None:
    assert summarise(tmp_path) == {}


def test_a_block_figure_is_that_of_the_fastest_case_with_its_source(tmp_path: Path) -> None:
    def over(ratio: float) -> dict[str, Any]:
        return {"published, cudnn": _spread(ratio), "published, fa4": _spread(9.0)}

    slow = _block(2.0, time_of_others=over(1.3), ceiling_fraction=_spread(0.8))
    fast = _block(1.5, strategy="upipe:4", time_of_others=over(1.6), ceiling_fraction=_spread(0.9))
    failed = _block(0.1, error="out of memory", time_of_others=over(7.0))
    peer = _block(0.2, kind="published", time_of_others=over(8.0))
    kept = _block(0.3, offload=False, time_of_others=over(6.0))  # what long rows have no room for
    _two_ranks(tmp_path, [slow, fast, failed, peer, kept])
    found = summarise(tmp_path)
    facts = {"source": "block.json", "commit": "c0ffee", "date": "2026-12-01"}
    assert found["speed.block_256k_ratio"] == {"value": 1.6, **facts, "device": "NVIDIA H200"}
    assert found["speed.block_256k_ceiling_fraction"]["value"] == 0.9
    assert "speed.block_128k_ratio" not in found


def test_the_latest_result_counts_and_none_of_a_cpu(tmp_path: Path) -> None:
    def case(ratio: float) -> list[dict[str, Any]]:
        return [_block(1.0, time_of_others={"published, cudnn": _spread(ratio)})]

    _two_ranks(tmp_path, case(1.5), name="a_later", time="11:00:00")
    _two_ranks(tmp_path, case(1.4), name="b_earlier")
    _two_ranks(tmp_path, case(5.0), name="c_cpu", device="CPU (x86_64)", time="12:00:00")
    _two_ranks(tmp_path, case(6.0), name="d_other", flavor="70B", time="12:00:00")
    assert summarise(tmp_path)["speed.block_256k_ratio"]["source"] == "a_later.json"


def test_offload_is_compared_with_the_same_case_without_it(tmp_path: Path) -> None:
    cases = [
        _block(2.02, offload=True),
        _block(2.0, offload=False),
        _block(1.0, offload=False, strategy="upipe:4"),
    ]
    _two_ranks(tmp_path, cases)
    assert summarise(tmp_path)["memory.offload_step_ratio_256k"]["value"] == 1.01


def test_every_figure_can_be_given(tmp_path: Path) -> None:
    k, m = 1 << 10, 1 << 20
    ratios = {"time_of_others": {"published, cudnn": _spread(1.5)}}
    cases = [
        _block(1.0, seq_len=n * k, offload=offload, ceiling_fraction=_spread(0.9), **ratios)
        for n in (128, 256, 512)
        for offload in (True, False)
    ]
    _two_ranks(tmp_path, cases)
    shapes = (("upipe:1", "selective"), ("upipe:1", "full"), ("ulysses", "selective"))
    peaks = [
        _block(1.0, strategy=s, mode=mode, seq_len=n * m, peak_b=5.5)
        for s, mode in shapes
        for n in (1, 5)
    ]
    _two_ranks(tmp_path, peaks, name="peak", ranks=8, peers="one process as rank 0, fake group")
    config = 'name = "llama3"\nflavor = "8B"\n'
    whole: dict[str, Any] = {"layers": None, "tps": _spread(3000.0)}
    speeds = [{**whole, "seq_len": n * k} for n in (128, 256, 512)]
    cut: dict[str, Any] = {"layers": 32, "extrapolated_from": [2, 4]}
    speeds += [{**whole, "seq_len": m, **cut}]
    _write(tmp_path, "rank8", "bench_rank8", ranks=8, config=config, cases=speeds)
    in_float8 = [{**case, "tps": _spread(4000.0)} for case in speeds]
    flags = ["--float8.enable", "--float8.recipe_name", "tensorwise"]
    later = {"ranks": 8, "config": config, "flags": flags, "date": "2026-12-02"}
    _write(tmp_path, "rank8_float8", "bench_rank8", cases=in_float8, **later)
    memory = [_dry_run(n, 7.5 * n) for n in (5, 8, 10, 12)]
    memory += [_dry_run(5, 30.0, moments=0), {**_dry_run(11, 70.0), "error": "out of memory"}]
    memory += [{**_dry_run(11, 70.0), "fits": False}, _dry_run(11, 78.5)]
    _write(tmp_path, "plan", "bench_plan", cases=memory)
    _write(tmp_path, "trace", "trace_share", seq_len=128 * k, shares={"unhidden": 0.07})
    found = summarise(tmp_path)
    assert list(found) == list(RULES)
    assert found["memory.rank8_8b_8Mi_reserved_gib"]["value"] == 60
    assert found["memory.rank8_8b_5Mi_reserved_gib"]["value"] == 37.5, "with Adam's moments"
    assert found["speed.rank8_8b_128k_tps"]["value"] == 3000, "float8 is another job"
    assert found["memory.longest_8b_8x80gb_Mi"]["value"] == 10, "12 would take 90 GiB"
    assert found["memory.upipe_selective_5Mi_peak_B"]["value"] == 5.5
