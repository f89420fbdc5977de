"""Every flavor has the number of parameters that its checkpoint is published with."""

from __future__ import annotations

import pytest
import torch

from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.models.spec import BUILT_IN, get_model

# Of Llama 3.x see test_llama3.py. A tied table counts once.
PUBLISHED = {
    ("llama3", "SmolLM2-135M"): 134_515_008,
    ("llama3", "SmolLM2-360M"): 361_821_120,
    ("llama3", "SmolLM2-1.7B"): 1_711_376_384,
    ("llama3", "3.0-8B"): 8_030_261_248,
    ("llama3", "3.0-70B"): 70_553_706_496,
    ("qwen2", "0.5B"): 494_032_768,
    ("qwen2", "1.5B"): 1_543_714_304,
    ("qwen2", "3B"): 3_085_938_688,
    ("qwen2", "7B"): 7_615_616_512,
    ("qwen2", "14B"): 14_770_033_664,
    ("qwen2", "32B"): 32_763_876_352,
    ("qwen2", "72B"): 72_706_203_648,
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "14B"): 14_768_307_200,
    ("qwen3", "32B"): 32_762_123_264,
    ("mistral", "7B"): 7_248_023_552,
    ("mistral", "Nemo-12B"): 12_247_782_400,
}


@pytest.mark.parametrize(("name", "flavor"), PUBLISHED)
def test_published_shapes_have_the_published_number_of_parameters(name: str, flavor: str) -> None:
    args = get_model(name).flavors[flavor]
    with torch.device("meta"):
        model = Decoder(args)
    built = sum(p.numel() for p in model.parameters())
    assert args.n_params() == built == PUBLISHED[name, flavor]


def test_every_flavor_is_checked() -> None:
    checked_elsewhere = {("llama3", f) for f in ("debugmodel", "1B", "3B", "8B", "70B", "405B")}
    flavors = {(name, flavor) for name in BUILT_IN for flavor in get_model(name).flavors}
    assert flavors == checked_elsewhere | set(PUBLISHED)


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_a_flavor_writes_as_config_json_reads_as_the_same_flavor(name: str) -> None:
    spec = get_model(name)
    assert spec.hf is not None
    for flavor, args in spec.flavors.items():
        if flavor != "debugmodel":  # which says no length
            assert spec.hf.read_config(spec.hf.write_config(args)) == args, flavor
