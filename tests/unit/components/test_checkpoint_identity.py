"""Of two models only that is said which makes them compute something else."""

from __future__ import annotations

from typing import Any

import pytest

from torchtitan_lc.components.checkpoint_identity import differing
from torchtitan_lc.config import names
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.models.spec import get_args, get_model, identity

YARN = {"model.rope.type": "yarn", "model.rope.factor": 4.0}
DYNAMIC = {"model.rope.type": "dynamic", "model.rope.factor": 4.0}


def identity_of(settings: dict[str, Any]) -> dict[str, Any]:
    config = JobConfig()
    for key, value in {"model.flavor": "8B", **settings}.items():
        names.set_key(config, key, value)
    spec = get_model(config.model.name)
    return identity(spec, config.model.flavor, get_args(spec, config))


@pytest.mark.parametrize("rope", [{}, {"model.rope.type": "default"}, YARN])
def test_another_row_length_alone_is_no_difference(rope: dict[str, Any]) -> None:
    short, long = (identity_of({**rope, "training.seq_len": n}) for n in (256, 10**6))
    assert short["max_position_embeddings"] != long["max_position_embeddings"]
    assert differing(short, long) == []


def test_a_row_length_that_rope_is_computed_from_is_one() -> None:
    short, long = (identity_of({**DYNAMIC, "training.seq_len": n}) for n in (256, 512))
    assert differing(short, long) == [
        "rope_scaling.seq_len: 256 -> 512 (set by training.seq_len)",
    ]


def test_a_dropped_scaling_is_named_alone_with_what_it_was_and_the_keys() -> None:
    plain = {"model.rope.type": "default", "training.seq_len": 10**6}
    (line,) = differing(identity_of(YARN), identity_of(plain))
    assert line.startswith(
        "rope_scaling: {'type': 'YarnScaling', 'factor': 4.0, 'original_max_position_embeddings'"
    )
    assert line.endswith("} -> None (set by model.rope.type and the keys beside it)")


def test_another_type_with_the_same_numbers_is_a_difference() -> None:
    linear, ntk = ({**YARN, "model.rope.type": rope} for rope in ("linear", "ntk"))
    (line,) = differing(identity_of(linear), identity_of(ntk))
    assert line == "rope_scaling.type: 'LinearScaling' -> 'NtkScaling' (set by model.rope.type)"


def test_of_two_scalings_of_one_type_the_settings_that_differ_are_named() -> None:
    other = {**YARN, "model.rope.factor": 8.0, "model.rope.beta_fast": 16.0}
    assert differing(identity_of(YARN), identity_of(other)) == [
        "rope_scaling.factor: 4.0 -> 8.0 (set by model.rope.factor)",
        "rope_scaling.beta_fast: 32.0 -> 16.0 (set by model.rope.beta_fast)",
    ]


def test_theta_names_its_key_and_the_shape_has_none() -> None:
    ours = identity_of({"model.rope.theta": 5e6})
    saved = {**identity_of({}), "dim": "7"}
    theta = saved["rope_theta"]
    assert differing(saved, ours) == [
        f"dim: 7 -> {ours['dim']}",
        f"rope_theta: {theta} -> 5000000.0 (set by model.rope.theta)",
    ]


def test_args_that_one_of_them_does_not_have_are_named() -> None:
    assert differing({"name": "a", "x": "1"}, {"name": "a", "y": "2"}) == [
        "y: not there -> 2",
        "x: 1 -> not there",
    ]


def test_where_nothing_is_known_of_lengths_all_count() -> None:
    assert differing({"max_position_embeddings": "4"}, {"max_position_embeddings": "8"}) == [
        "max_position_embeddings: 4 -> 8"
    ]


def test_a_checkpoint_that_says_nothing_differs_in_nothing_known() -> None:
    assert differing({}, {"name": "a"}) == []
