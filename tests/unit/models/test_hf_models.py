"""Every family against transformers: a tiny random model of theirs, renamed into ours, one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.hf_models import FAMILIES, our_model, transformers_model
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.models.spec import get_model

pytest.importorskip("transformers")

SEQ = 64


def tokens() -> torch.Tensor:
    return torch.randint(0, 97, (2, SEQ), generator=torch.Generator().manual_seed(1))


def positions() -> torch.Tensor:
    return torch.arange(SEQ).expand(2, -1)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = transformers_model(family)
    ours = our_model(family, theirs, tmp_path)
    want = theirs(input_ids=tokens()).logits
    got = ours(tokens(), positions())
    assert (got - want).abs().max() <= 1e-5

    labels = torch.roll(tokens(), -1, dims=1)
    labels[:, -1] = -100
    F.cross_entropy(want.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    ours(tokens(), positions(), labels).backward()
    hf = get_model(FAMILIES[family][0]).hf
    assert hf is not None
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        grad = expected[hf.name(name)].grad
        assert parameter.grad is not None and grad is not None and grad.norm() > 0
        # A key's bias adds the same to all scores of a query, but for rope: its gradient is small.
        assert (parameter.grad - grad).norm() <= 1e-4 * grad.norm(), name


ROPE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("kind", ROPE)
def test_logits_under_every_rope_scaling_are_those_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 500.0, **ROPE[kind]}
    theirs = transformers_model("llama", rope_parameters=rope)
    ours = our_model("llama", theirs, tmp_path)
    want = theirs(input_ids=tokens()).logits
    got = ours(tokens(), positions())
    assert (got - want).abs().max() <= 1e-5


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_compiled_functions_give_the_same_with_biases_and_norms_of_heads(
    family: str, tmp_path: Path
) -> None:
    ours = our_model(family, transformers_model(family), tmp_path)
    want = ours(tokens(), positions())
    ours.functions.compile("aot_eager")
    try:
        torch.testing.assert_close(ours(tokens(), positions()), want, rtol=0, atol=1e-6)
    finally:
        torch.compiler.reset()


def test_new_biases_start_at_zero_and_norms_of_heads_at_one() -> None:
    for name, suffix, value in (("qwen2", ".bias", 0.0), ("qwen3", "_norm.weight", 1.0)):
        args = dataclasses.replace(
            get_model(name).flavors["0.5B" if name == "qwen2" else "0.6B"],
            dim=64,
            n_layers=1,
            hidden_dim=64,
            vocab_size=64,
        )
        model = Decoder(args)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
            model.init_weights(seed=0)
        found = [p for n, p in model.named_parameters() if n.endswith(suffix)]
        assert found and all((p == value).all() for p in found)
        assert all(p.isfinite().all() for p in model.parameters())
