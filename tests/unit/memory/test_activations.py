"""From the configuration to blocks: budgets that the host cannot meet, segments, keys on "auto"."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.offloaded import LAYERS, build, loss_of, sizes
from tests.tiny import gradients, tiny_config
from torchtitan_lc.memory import activations
from torchtitan_lc.memory.activations import host_budget, resolve, set_up_blocks
from torchtitan_lc.memory.placement import GIB, host_state
from torchtitan_lc.tools.errors import UserError

OFFLOAD = {"activation_offload.enable": True}


class Block:
    checkpoint: Any = None


def _set_up(settings: dict[str, Any], shards: int = 0) -> list[Any]:
    blocks = [Block() for _ in range(LAYERS)]
    device = torch.device("cpu")
    return set_up_blocks(blocks, tiny_config(settings), sizes(), device, shards).segments


def test_a_budget_that_the_host_does_not_have_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = sizes()
    all_of_it = 2 * one.input + LAYERS * one.outputs
    monkeypatch.setattr(activations, "available_bytes", lambda ranks: all_of_it - 1)
    with pytest.raises(UserError, match="host_memory_gib = 1.0: the plan.*lower host_memory_gib"):
        _set_up({**OFFLOAD, "activation_offload.host_memory_gib": 1.0})
    _set_up(OFFLOAD)  # "auto" takes what there is
    # Layers that share their buffers need less than the plan says.
    _set_up(
        {
            **OFFLOAD,
            "activation_offload.host_memory_gib": 1.0,
            "debug.share_offload_buffers": True,
        }
    )


def test_the_budget_is_that_of_the_key_or_nine_tenths_of_what_is_there() -> None:
    assert host_budget(tiny_config({}), 1000) == 0
    assert host_budget(tiny_config(OFFLOAD), 1000) == 900
    named = {**OFFLOAD, "activation_offload.host_memory_gib": 1.5}
    assert host_budget(tiny_config(named), 1000) == GIB * 3 // 2


@pytest.mark.parametrize("offload", [False, True])
def test_segments_begin_where_an_input_is_kept(offload: bool) -> None:
    base = {"activation_offload.enable": offload}
    for every, begin in ((1, []), (2, [0, 2]), (3, [0]), (5, [0])):
        segments = _set_up({**base, "activation_checkpoint.block_inputs_every": every})
        assert [i for i, segment in enumerate(segments) if segment is not None] == begin
    plain = {"activation_checkpoint.mode": "none", "activation_checkpoint.block_inputs_every": 2}
    assert _set_up(plain) == [None] * LAYERS


def test_auto_spends_a_buffer_where_it_is_a_64th_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activations, "device_memory", lambda device_type: 6400)
    assert resolve("auto", 100, "cpu") is True and resolve("auto", 101, "cpu") is False
    assert resolve(True, 101, "cpu") is True and resolve(False, 100, "cpu") is False


def test_shared_buffers_hold_one_of_each_size_and_give_wrong_gradients() -> None:
    """Said so in the log: it is for measuring the GPU's memory."""
    shared, offload = build({**OFFLOAD, "debug.share_offload_buffers": True})
    plain, _ = build({})
    loss_of(shared).backward()
    loss_of(plain).backward()
    assert offload is not None
    one = sizes()
    assert offload.memory.allocated < one.input + one.outputs
    got, want = gradients(shared), gradients(plain)
    assert any(not torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(
    ("settings", "per_byte"),
    [
        ({}, 0),
        ({"optimizer.name": "AdamW", "optimizer.offload_state": True}, 2),
        ({"optimizer.name": "AdamW", "training.enable_cpu_offload": True}, 6),
        ({"optimizer.name": "SGD", "training.enable_cpu_offload": True}, 4),
    ],
)
def test_host_memory_that_the_model_will_need_is_not_given_to_activations(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], per_byte: int
) -> None:
    one = sizes()
    shards = 2 * one.input + LAYERS * one.outputs  # as much as the plan takes
    monkeypatch.setattr(activations, "available_bytes", lambda _: per_byte * shards + 100)
    with pytest.raises(UserError, match="0.0 GiB are free"):
        # What is left is less than the plan takes, whatever of the model comes to the host later.
        _set_up({**OFFLOAD, **settings, "activation_offload.host_memory_gib": 1.0}, shards)
    assert host_state(tiny_config(settings), shards) == per_byte * shards
