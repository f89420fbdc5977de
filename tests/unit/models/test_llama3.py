"""Llama 3's published shapes, registration, and initial weights."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reference import reference_logits
from tests.tiny import FLAVORS as TINY
from tests.tiny import masked_rows
from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.models import spec as registry
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.models.decoder.settings import adjust
from torchtitan_lc.models.llama3 import FLAVORS
from torchtitan_lc.models.spec import ModelSpec, get_args, get_model, register_model
from torchtitan_lc.ops.rope import Llama3Scaling
from torchtitan_lc.tools.errors import UserError

# Numbers of parameters as published with each checkpoint.
PUBLISHED = {
    "1B": 1_235_814_400,
    "3B": 3_212_749_824,
    "8B": 8_030_261_248,
    "70B": 70_553_706_496,
    "405B": 405_853_388_800,
}


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_published_shapes_have_the_published_number_of_parameters(flavor: str) -> None:
    args = FLAVORS[flavor]
    assert args.n_params() == PUBLISHED[flavor]
    with torch.device("meta"):
        model = Decoder(args)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[flavor]


def test_the_debug_model_is_small_and_grouped() -> None:
    args = FLAVORS["debugmodel"]
    assert 1e6 <= args.n_params() <= 2e6
    assert (args.n_heads, args.n_kv_heads) == (8, 4)


@pytest.mark.parametrize("flavor", ["mha", "gqa", "one_kv", "seven", "tied"])
def test_logits_are_those_of_the_plain_model(flavor: str) -> None:
    args = TINY[flavor]
    model = Decoder(args).double()
    model.init_weights(seed=1)
    rows = masked_rows(2, 64)
    want = reference_logits(dict(model.named_parameters()), args, rows["tokens"], rows["positions"])
    got = model(rows["tokens"], rows["positions"])
    assert (got - want).abs().max() < 1e-10


def test_positions_are_never_made_up() -> None:
    with pytest.raises(TypeError, match="positions"):
        Decoder(TINY["gqa"])(torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="begin with position 0"):
        Documents.from_positions(torch.arange(32, 64).view(1, -1))


def test_a_tied_model_has_one_table_with_the_gradient_of_both_uses() -> None:
    model = Decoder(TINY["tied"])
    names = [n for n, p in model.named_parameters() if p.shape[0] == TINY["tied"].vocab_size]
    assert names == ["tok_embeddings.weight"]
    assert len(list(Decoder(TINY["gqa"]).parameters())) == len(list(model.parameters())) + 1


def test_an_untied_head_uses_its_own_table() -> None:
    model = Decoder(TINY["gqa"])
    model.init_weights(seed=0)
    rows = masked_rows(1, 64)
    before = model(rows["tokens"], rows["positions"])
    assert model.head.output is not None
    with torch.no_grad():
        model.head.output.weight.mul_(2)
    assert torch.equal(model(rows["tokens"], rows["positions"]), 2 * before)


def test_initial_weights_depend_on_the_seed_alone_and_are_normal_within_three_sigma() -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        model = Decoder(TINY["gqa"])
        model.init_weights(seed)
        return {n: p.detach() for n, p in model.named_parameters()}

    torch.manual_seed(1)
    first = weights(0)
    torch.manual_seed(2)
    again, other = weights(0), weights(1)
    assert all(torch.equal(first[n], again[n]) for n in first)
    table = "tok_embeddings.weight"
    assert not torch.equal(first[table], other[table])
    assert not torch.equal(
        first["layers.0.attention.wq.weight"], first["layers.1.attention.wq.weight"]
    )
    z = first["layers.0.feed_forward.w1.weight"] / TINY["gqa"].init_std
    assert z.abs().max() <= 3.0 and abs(z.mean()) < 0.03
    assert 0.96 < z.std() < 1.01  # 0.9866 for a normal distribution cut off at 3 sigma


def test_nothing_is_left_as_raw_memory_after_building_on_the_meta_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty_like = torch.empty_like

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty_like(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    with torch.device("meta"):
        model = Decoder(TINY["gqa"])
    monkeypatch.setattr(torch, "empty_like", poisoned)
    model.to_empty(device="cpu")
    monkeypatch.undo()
    assert all(p.isnan().all() for p in model.parameters()), "the poison must reach the weights"
    model.init_weights(seed=0)
    direct = Decoder(TINY["gqa"])
    direct.init_weights(seed=0)
    for (name, got), (_, want) in zip(
        model.state_dict().items(), direct.state_dict().items(), strict=True
    ):
        assert torch.equal(got, want), name
    rows = masked_rows(1, 64)
    logits = [m(rows["tokens"], rows["positions"]) for m in (model, direct)]
    assert torch.equal(*logits)


def test_rope_overrides_of_the_config_reach_the_model() -> None:
    config = JobConfig()
    config.model.rope.theta = 1e6
    config.model.rope.factor = 32.0
    args = adjust(FLAVORS["8B"], config)
    assert args.rope_theta == 1e6
    assert args.rope_scaling == Llama3Scaling(factor=32.0), "the rest stays as the flavor has it"
    config.model.rope.type = "default"
    config.model.rope.factor = None
    assert adjust(FLAVORS["8B"], config).rope_scaling is None


def test_a_scaling_factor_for_a_model_without_scaling_is_refused() -> None:
    config = JobConfig()
    config.model.rope.factor = 32.0
    with pytest.raises(UserError, match=r"model\.rope\.type"):
        adjust(FLAVORS["debugmodel"], config)


def test_scaling_that_does_not_fit_the_flavors_own_numbers_is_refused_with_the_section() -> None:
    config = JobConfig()
    config.model.rope.low_freq_factor = 5.0  # the flavor's high_freq_factor is 4
    with pytest.raises(UserError, match=r"\[model\.rope\].*low_freq_factor=5\.0, high_.*=4\.0"):
        adjust(FLAVORS["8B"], config)


def test_an_unknown_model_and_an_unknown_flavor_name_those_that_exist() -> None:
    with pytest.raises(UserError, match="llama3"):
        get_model("lama3")
    config = JobConfig()
    config.model.flavor = "8b"
    with pytest.raises(UserError, match="did you mean '8B'"):
        get_args(get_model("llama3"), config)


def test_a_name_can_be_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", {})
    spec = ModelSpec("mine", {}, build=torch.nn.Identity, parallelize=lambda *_: None)
    register_model(spec)
    with pytest.raises(ValueError, match="already"):
        register_model(spec)
    taken = dataclasses.replace(spec, name="llama3")
    with pytest.raises(ValueError, match="already"):
        register_model(taken)  # a built-in name is taken even before its package is imported


def test_args_that_cannot_be_made_small_for_the_self_check_are_refused_with_the_fix() -> None:
    class Plain:
        n_layers = 8

    spec = ModelSpec("plain", {}, Decoder, lambda *args: None)
    with pytest.raises(UserError, match="Plain smaller, which is no dataclass.*shrink"):
        spec.shrink(Plain())


def test_the_documented_example_registers_and_trains(tmp_path: Path) -> None:
    """Runs docs/registering-a-model.md as a user would: its code block as a package of one's own."""
    root = Path(__file__).parents[3]
    text = (root / "docs" / "registering-a-model.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    (tmp_path / "my_models.py").write_text(code, encoding="utf-8")
    flags = [
        "--experimental.custom_import=my_models",
        "--model.name=wide_llama",
        "--model.flavor=tiny",
        "--training.steps=2",
        "--training.seq_len=128",
        "--training.mixed_precision_param=float32",
        f"--job.dump_folder={tmp_path / 'out'}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan_lc.train", *flags],
        env={"PYTHONPATH": f"{root}:{tmp_path}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "wide_llama" in done.stderr + done.stdout
    assert (tmp_path / "out" / "metrics.jsonl").read_text().count("\n") == 2
