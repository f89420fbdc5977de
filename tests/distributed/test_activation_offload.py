"""Activations in host memory on ranks that share rows: the same bits, and the same exchanges everywhere."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.distributed.test_sharded_model import CountCollectives, _grads, _trainer
from tests.helpers import run_distributed
from tests.tiny import FLAVORS, masked_rows, register_tiny
from torchtitan_lc.memory import activations

LAYERS, STAGES, ARRIVALS = 3, 4, 2  # 4 stages of one head per rank; each KV head is exchanged once
FORWARD = 2 * STAGES + 2 * ARRIVALS  # exchanges of a layer
BACKWARD = STAGES * (1 + 1 + 1 + 1) + 2 * ARRIVALS + 2 * ARRIVALS
UNITS = LAYERS + 2


def _deep() -> None:
    FLAVORS["deep"] = dataclasses.replace(FLAVORS["gqa"], n_layers=LAYERS)
    register_tiny()


def _settings(tmp: str, world_size: int, **activation: Any) -> dict[str, Any]:
    return {
        "job.dump_folder": tmp,
        "model.flavor": "deep",
        "parallelism.context_parallel_degree": world_size,
        "training.global_batch_size": 2,  # two micro-batches
        "attention.sum_kv_gradients": True,
        "tiling.projection_tokens": 0,
        "tiling.mlp_tokens": 0,
        "tiling.loss_tokens": 0,
        **{key.replace("__", "."): value for key, value in activation.items()},
    }


def _same_bits_and_exchanges(rank: int, world_size: int, tmp: str) -> None:
    _deep()
    rows = masked_rows(2, 64)
    want: dict[str, torch.Tensor] = {}
    counts = {}
    cases = [("none", 1, False), ("selective", LAYERS, True)]
    cases += [(mode, 1, True) for mode in ("selective", "full")]
    cases += [(mode, 2, offload) for mode in ("selective", "full") for offload in (False, True)]
    for mode, every, offload in cases:
        settings = _settings(
            tmp,
            world_size,
            activation_checkpoint__mode=mode,
            activation_checkpoint__block_inputs_every=every,
            activation_offload__enable=offload,
            activation_offload__early_fetch=every == 2,
        )
        trainer = _trainer(settings, rows)
        _grads(trainer)  # the first step builds FSDP's lazy state
        with CountCollectives() as counted:
            got = _grads(trainer)
        want = want or got
        for name, grad in got.items():
            assert torch.equal(grad, want[name]), (mode, every, offload, name)
        again = FORWARD if mode == "full" else 0
        assert counted.counts["alltoall_base_"] == 2 * LAYERS * (FORWARD + again + BACKWARD)
        # A block that is computed again in another's backward is gathered for it, and stays for its own.
        assert counted.counts["_allgather_base_"] == 2 * (UNITS + UNITS - 2)
        assert counted.counts["_reduce_scatter_base_"] == 2 * UNITS
        counts[mode, every, offload] = dict(counted.counts)
    _equal_everywhere(counts, world_size)


def _equal_everywhere(value: Any, world_size: int) -> None:
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, value)
    assert all(other == value for other in everyone), everyone


def test_offload_and_segments_change_no_bit_and_no_number_of_collectives(tmp_path: Any) -> None:
    run_distributed(_same_bits_and_exchanges, 2, str(tmp_path), timeout=120)


def _unequal_hosts(rank: int, world_size: int, tmp: str) -> None:
    _deep()
    rows = masked_rows(2, 64)
    args = FLAVORS["deep"]
    h = 64 // world_size * args.dim * 4
    lse = 64 * args.n_heads // world_size * 4
    # Room for both inputs, and on rank 0 for the outputs of 2 layers, on rank 1 for those of all 3.
    room = 2 * h + (rank + 2) * (h + lse)
    settings = _settings(tmp, world_size, activation_offload__enable=True)
    with (
        patch.object(activations, "available_bytes", return_value=(room * 10 + 8) // 9),
        # On rank 1 h is a 64th of the device's memory, on rank 0 it is more.
        patch.object(activations, "device_memory", return_value=64 * h - 1 + rank),
    ):
        trainer = _trainer({**settings, "attention.sum_kv_gradients": "auto"}, rows)
    with CountCollectives() as counted:
        _grads(trainer)
    _equal_everywhere(dict(counted.counts), world_size)
    # One layer keeps, two compute again, whose outputs of a time take the rest; sums are not roomy.
    each_stage = BACKWARD - 2 * ARRIVALS + 2 * STAGES
    assert counted.counts["alltoall_base_"] == 2 * (LAYERS * (FORWARD + each_stage) + 2 * FORWARD)


def test_ranks_with_unequal_memory_plan_alike(tmp_path: Any) -> None:
    run_distributed(_unequal_hosts, 2, str(tmp_path), timeout=60)
