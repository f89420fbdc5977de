"""Shares of a step's time, on a trace small enough to add up by hand."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import trace_share
from benchmarks.trace_share import Event, events_of, kind_of, layer_window, shares, union


def _event(category: str, name: str, stream: int, start: float, dur: float) -> dict[str, Any]:
    args = {"stream": stream}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": dur, "args": args}


#  0    10   20   30   40   50   60   70   80   90   100
#  [attention][gemm   ]    [copy in      ]     [gelu]     compute 20 + 15, copies, other 10
#        [nccl     ]                                      20: 10 beside attention, 5 beside gemm
TRACE = [
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 500, "tid": 1},
    _event("kernel", "kernel_cutlass_FlashAttentionForwardSm90", 7, 0, 20),
    _event("kernel", "nvjet_hsh_192x192", 7, 20, 15),
    _event("kernel", "ncclDevKernel_SendRecv", 9, 10, 30),
    _event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 11, 38, 20),
    _event("kernel", "elementwise_kernel", 7, 80, 20),
    {"ph": "M", "name": "process_name", "args": {}},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": TRACE}).encode()))
    return path


def test_an_instant_counts_once_and_for_what_matters_most(trace: Path) -> None:
    found = shares(events_of(trace))
    expected = {
        "attention": 0.20,
        "matmul": 0.15,
        "other": 0.20,
        "exchange": 0.05,  # of 30 only 35 to 40 has no kernel beside it
        "copies": 0.18,  # 38 to 40 lie beside the exchange
        "idle": 0.22,
    }
    assert found == pytest.approx(expected)
    assert sum(found.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("category", "name", "kind"),
    [
        ("kernel", "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("kernel", "void pytorch_flash::flash_bwd_dot_do_o_kernel<...>", "attention"),
        ("kernel", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matmul"),
        ("kernel", "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", "matmul"),
        ("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)", "exchange"),
        ("kernel", "triton_red_fused_add_mul_0", "other"),
        ("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", "copies"),
        ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", "other"),
    ],
)
def test_kernels_are_known_by_their_names(category: str, name: str, kind: str) -> None:
    assert kind_of(category, name) == kind


def test_overlapping_and_touching_intervals_become_one() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]


def test_the_window_of_a_layer_reaches_to_the_next_layers_first_attention_kernel() -> None:
    def attention(name: str, at: float) -> Event:
        return Event("attention", name, "7", at, at + 1)

    forward = [attention("flash_fwd", 10.0 * i) for i in range(4)]  # 2 layers of 2 stages
    # backward: the last layer first, each stage recomputed before it
    backward = [
        attention(name, 100.0 + 10 * i + shift)
        for i in range(4)
        for name, shift in (("flash_fwd", 0.0), ("flash_bwd", 5.0))
    ]
    events = [*forward, Event("matmul", "gemm", "7", 31, 60), *backward]
    assert layer_window(events, 2, 0, backward=False) == (0, 20)
    assert layer_window(events, 2, 1, backward=False) == (20, 100)  # where recomputation begins
    assert layer_window(events, 2, 1, backward=True) == (105, 125)
    assert layer_window(events, 2, 0, backward=True) == (125, 136)


def test_a_trace_becomes_a_record_and_a_picture(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    listed = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    listed.append(_event("kernel", "FlashAttentionBackwardSm90", 7, 110, 20))
    plain = tmp_path / "rank0_trace.json"
    gpus = [{"id": i, "name": "NVIDIA H200"} for i in range(2)]
    plain.write_text(json.dumps({"deviceProperties": gpus, "traceEvents": listed}))
    words = ["--name", "t", "--trace", str(plain), "--seq_len", "128K", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["trace_share", *words])
    trace_share.main()
    record = json.loads((tmp_path / "t.json").read_text())
    assert (record["device"], record["devices"]) == ("NVIDIA H200", 2)
    assert record["seq_len"] == 131072 and record["trace"] == "rank0_trace.json"
    parts = ("other", "exchange", "copies", "idle")
    assert record["shares"]["unhidden"] == pytest.approx(sum(record["shares"][p] for p in parts))
    assert (tmp_path / "t.png").stat().st_size > 0


def test_a_trace_without_a_gpu_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps({"traceEvents": TRACE[:1]}))
    with pytest.raises(ValueError, match="cpu.json has no event of a GPU"):
        events_of(path)


def test_a_trace_that_does_not_name_its_gpu_is_refused(trace: Path) -> None:
    with pytest.raises(ValueError, match="does not say which GPU"):
        trace_share.device_of(trace)
