"""[float8] in the real Trainer: untied heads over two ranks under FSDP2, in bf16 and in fp32."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.distributed.test_training_equals_one_process import one_step
from tests.helpers import run_distributed
from tests.reference import reference_step
from tests.tiny import FLAVORS, masked_rows
from tests.unit.ops.test_linear import E4M3, E5M2, both
from torchtitan_lc.models.decoder.float8 import float8_problems
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.models.decoder.parallelize import parallelize
from torchtitan_lc.models.decoder.settings import adjust
from torchtitan_lc.models.spec import ModelSpec, register_model

# Four query heads a rank in stages of one, heads of 16.
ARGS = dataclasses.replace(FLAVORS["gqa"], dim=128, head_dim=16)
MODES = ("none", "full", "selective")


def _settings(tmp: str, **more: Any) -> dict[str, Any]:
    return {
        "job.dump_folder": tmp,
        "model.name": "sixteen",
        "model.flavor": "gqa",
        "training.global_batch_size": 2,
        "parallelism.context_parallel_degree": 2,
        "attention.strategy": "upipe",
        "float8.enable": True,
        "float8.emulate": True,
        **more,
    }


def _register() -> None:
    register_model(
        ModelSpec("sixteen", {"gqa": ARGS}, Decoder, parallelize, adjust, float8=float8_problems)
    )


def _equal(got: dict[str, Any], want: dict[str, Any], label: object) -> None:
    assert got["loss"] == want["loss"], label
    for name, grad in want["grads"].items():
        assert torch.equal(got["grads"][name], grad), (label, name)


def _bits(rank: int, world_size: int, tmp: str) -> None:
    _register()
    rows = masked_rows(2, 64, packed=True)
    for recipe, dtype in (
        ("tensorwise", "bfloat16"),
        ("rowwise", "float32"),
        ("rowwise_with_gw_hp", "bfloat16"),
    ):
        settings = _settings(
            tmp,
            **{"float8.recipe_name": recipe, "training.mixed_precision_param": dtype},
        )
        want = one_step(settings, rows, "cpu")
        for mode in (*MODES, MODES[0]):
            again = {**settings, "activation_checkpoint.mode": mode}
            _equal(one_step(again, rows, "cpu"), want, (recipe, dtype, mode))


def test_bits_over_two_ranks_are_the_same_each_time_and_under_every_checkpointing(
    tmp_path: Any,
) -> None:
    pytest.importorskip("torchao")
    run_distributed(_bits, 2, str(tmp_path), timeout=250)


def _near(rank: int, world_size: int, tmp: str) -> None:
    _register()
    rows = masked_rows(2, 64, packed=True)
    model = Decoder(ARGS)
    model.init_weights(seed=0)
    loss, grads = reference_step(model, ARGS, rows)
    got = one_step(_settings(tmp), rows, "cpu")
    assert abs(got["loss"] - loss) <= 1e-3 * loss
    for name, grad in grads.items():
        error = ((got["grads"][name] - grad).norm() / grad.norm()).item()
        if name.startswith("layers."):
            # As in tests/unit/models/test_float8.py: four products forward, four backward.
            bound = 2 * (both(E4M3, E4M3) ** 2 + both(E5M2, E4M3) ** 2) ** 0.5
            assert 0.02 < error <= bound, (name, error)
        else:  # from new weights, what blocks add is small beside the stream
            assert error <= 0.01, (name, error)


def test_gradients_over_two_ranks_are_as_exact_as_float8_is(tmp_path: Any) -> None:
    pytest.importorskip("torchao")
    run_distributed(_near, 2, str(tmp_path), timeout=120)


def _self_check(rank: int, world_size: int, tmp: str) -> None:
    _register()
    one_step(_settings(tmp, **{"attention.self_check": True}), masked_rows(2, 64), "cpu")


def test_the_self_check_compares_what_is_no_rounding(tmp_path: Any) -> None:
    """In fp32 it allows 1e-3; tiles of other sizes, and so other scales, differ by far more."""
    pytest.importorskip("torchao")
    run_distributed(_self_check, 2, str(tmp_path), timeout=120)
