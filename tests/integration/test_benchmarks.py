"""The benchmark scripts run, and record what they must: tried at sizes that measure nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.host_time import per_layer

ROOT = Path(__file__).parents[2]
TINY = ("--flavor", "debugmodel", "--dtype", "float32", "--repeats", "2", "--matmul_size", "64")


def _run(script: str, folder: Path, *words: str, ranks: int | None = None) -> dict[str, Any]:
    """What ``script`` records; without ``ranks`` in a single process, else under torchrun."""
    meeting = (
        "--rdzv_backend",
        "c10d",
        "--rdzv_endpoint",
        "localhost:0",
        "--local_addr",
        "localhost",
    )
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), *meeting]
    start = [sys.executable, *(launcher if ranks else ()), "-m", f"benchmarks.{script}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BENCH_COMMIT": "none"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [*start, "--name", "tiny", "--out", str(folder), *words]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.terminate()  # a launcher ends its workers, which are no children of this process
        process.communicate(timeout=30)
        raise
    assert process.returncode == 0, errors
    record: dict[str, Any] = json.loads((folder / "tiny.json").read_text())
    assert {"script", "commit", "date", "time", "device", "versions"} <= set(record)
    assert record["script"] == script
    assert (folder / "tiny.md").read_text().startswith("| "), "a table, too"
    return record


def test_bench_block_compares_every_case_and_records_the_failed_ones_too(tmp_path: Path) -> None:
    record = _run(
        *("bench_block", tmp_path, *TINY, "--ranks", "4", "--seq_lens", "128", "256"),
        *("--kernels", "cpu", "--strategies", "upipe:1", "ring", "local", "--compile", "off", "on"),
        *("--backend", "eager", "--offload", "on", "--published_kernels", "cpu"),
    )
    assert record["peers"] == "one process as rank 0, fake group" and record["matmul_tflops"] > 0
    for seq_len in (128, 256):
        cases = [case for case in record["cases"] if case["seq_len"] == seq_len]
        names = [(case["strategy"], case["compile"]) for case in cases]
        ours = [(name, on) for name in ("upipe:1", "ring", "local") for on in (False, True)]
        assert names == [*ours, ("published", False)]
        for case in cases[:4]:
            assert case["seconds"]["min"] > 0 and case["ceiling_fraction"]["median"] > 0
            assert set(case["time_of_others"]) == {"published, cpu"}
            assert "compiled_in_timed_steps" not in case
        assert "4 ranks" in cases[4]["error"], "a case that cannot run is a result"
        # Selective runs attention forward once per stage, the published schedule twice.
        upipe, published = cases[0], cases[-1]
        assert upipe["ceiling"]["kernel_calls"] == 4
        assert published["ceiling"]["kernel_calls"] == 6


def test_a_stand_in_is_measured_against_no_ceiling(tmp_path: Path) -> None:
    record = _run(
        *("bench_block", tmp_path, *TINY, "--ranks", "4", "--seq_lens", "128"),
        *("--kernels", "stand-in", "--layers", "2", "--offload", "on"),
    )
    (case,) = record["cases"]
    assert case["kernel"] == "stand-in" and "ceiling" not in case and "error" not in case


def test_bench_peers_compares_on_real_ranks_and_says_which_peer_cannot_be_had(
    tmp_path: Path,
) -> None:
    record = _run(
        *("bench_peers", tmp_path, *TINY, "--ranks", "2", "--seq_lens", "128"),
        *("--kernels", "cpu", "--published_kernels", "cpu", "--peer_kernels", "cpu"),
        *("--compile", "on", "--backend", "eager", "--peers", "torch_cp:allgather:gqa:selective"),
        ranks=2,
    )
    ours, published, torch_cp = record["cases"]
    assert record["peers"] == "real ranks"
    assert set(ours["time_of_others"]) == {"published, cpu"} and published["seconds"]["min"] > 0
    assert torch_cp["mode"] == "selective" and torch_cp["compile"]
    assert ours["compile"] and not published["compile"]
    # It has no CPU kernel; on a GPU this is a measurement.
    assert "flash_attention_for_cpu" in torch_cp["error"]


def test_bench_attention_records_speeds_and_reasons(tmp_path: Path) -> None:
    shape = ("--heads", "2", "--head_dim", "8", "--dtype", "float32", "--repeats", "1")
    record = _run(
        "bench_attention", tmp_path, *shape, "--seq_lens", "64", "128", "--kernels", "cpu", "fa4"
    )
    done, refused, *_ = record["cases"]
    assert len(record["cases"]) == 4 and done["seq_len"] == 64
    assert done["forward_tflops"]["median"] > 0 and done["backward_tflops"]["median"] > 0
    assert "needs a CUDA device" in refused["error"]
    record = _run("bench_attention", tmp_path, *shape, "--seq_lens", "256K", "--kernels", "math")
    assert "GiB are free" in record["cases"][0]["error"], "too large for memory: not tried"


def test_bench_rank8_runs_the_job_as_one_rank_of_8(tmp_path: Path) -> None:
    record = _run(
        *("bench_rank8", tmp_path, "--config", "debug.toml", "--seq_lens", "1K", "2K"),
        *("--parallelism.context_parallel_degree", "8", "--activation_offload.enable"),
        *("--layers", "1", "2", "--whole_layers", "3", "--repeats", "1", "--exchange_gbps", "1"),
    )
    assert len(record["cases"]) == 6 and 'strategy = "upipe"' in record["config"]
    one, two, whole = record["cases"][3:]
    assert [c["seq_len"] for c in (one, two, whole)] == [2048] * 3
    assert two["seconds"]["median"] > 0 and two["host_gib"] > 0
    assert two["tps_no_traffic_hidden"]["median"] < two["tps"]["median"]
    assert two["traffic_gib"]["exchange"] == 2 * one["traffic_gib"]["exchange"] > 0
    assert whole["layers"] == 3 and whole["extrapolated_from"] == [1, 2]


def test_bench_rank8_asks_the_jobs_own_checks(tmp_path: Path) -> None:
    record = _run(
        *("bench_rank8", tmp_path, "--config", "debug.toml", "--training.seq_len", "1K"),
        *("--ranks", "2", "--repeats", "1", "--no.such_key", "1"),
    )
    (case,) = record["cases"]
    assert "no.such_key" in case["error"]


def test_host_time_tells_layers_from_the_rest_of_a_step(tmp_path: Path) -> None:
    record = _run(
        *(
            "host_time",
            tmp_path,
            "--config",
            "debug.toml",
            "--parallelism.context_parallel_degree=2",
        ),
        *("--attention.strategy=upipe", "--layers", "1", "3", "--seq_len", "256", "--repeats", "3"),
        *("--case", "plain", "--case", "one stage: --attention.strategy=ulysses"),
        *("--case", "none: --attention.strategy=spiral"),
    )
    plain, one_stage, none = record["cases"]
    assert plain["flags"] == [] and one_stage["flags"] == ["--attention.strategy=ulysses"]
    assert "spiral" in none["error"]
    few, many = plain["times"]
    assert plain["seconds"] == per_layer(few, many, [1, 3])
    assert all(len(times[part]) == 3 for times in plain["times"] for part in times)
    assert record["exchange_us"]["fake"]["median"] > 0


def test_exchange_measures_ranks_and_host(tmp_path: Path) -> None:
    record = _run(
        "exchange", tmp_path, "--mib", "1", "2", "--copy_mib", "1", "--repeats", "1", ranks=2
    )
    assert [line["mib"] for line in record["all_to_all"]] == [1, 2]
    assert all(line["gbps"]["median"] > 0 for line in record["all_to_all"])
    assert set(record["host_copies"]) == {"device_to_host", "host_to_device", "both_each_way"}
