"""Tiny random models made by transformers, and ours with their weights: one of each family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.models.spec import flavor_args, get_model

# Family -> `model.name`, transformers' class of config, and what differs from the shape below. Heads: 4/2,
# 6/2 and 14/2 (query / KV); sizes of a head that are not width / heads.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama3", "LlamaConfig", {}),
    "llama tied": ("llama3", "LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": (
        "qwen2",
        "Qwen2Config",
        {"num_attention_heads": 14, "hidden_size": 112, "tie_word_embeddings": True},
    ),
    "qwen2 6/2": ("qwen2", "Qwen2Config", {"num_attention_heads": 6, "hidden_size": 48}),
    "qwen3": ("qwen3", "Qwen3Config", {"num_attention_heads": 6, "head_dim": 16}),
    "mistral": ("mistral", "MistralConfig", {"head_dim": 24, "sliding_window": None}),
}
_SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}


def transformers_model(family: str, **changes: Any) -> Any:
    """A random model of transformers in fp32, every parameter of it, biases and norms too."""
    import transformers

    _, config_class, own = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**_SHAPE, **own, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            start = 1.0 if parameter.dim() == 1 else 0.0
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(start + 0.1 * noise)
    return model.float().eval()


def write_config(model: Any, folder: Path) -> dict[str, Any]:
    """Save config.json of a transformers model as it saves it, and return its content."""
    model.config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def read_args(family: str, folder: Path) -> DecoderArgs:
    """Our args of the config.json in ``folder``."""
    config = JobConfig()
    config.model.name, config.model.flavor = FAMILIES[family][0], "from_hf"
    config.model.hf_assets_path = str(folder)
    return flavor_args(get_model(config.model.name), config)


def renamed_weights(family: str, model: Any, args: DecoderArgs) -> dict[str, Tensor]:
    """Its weights under our names; the two sets of names must match."""
    hf = get_model(FAMILIES[family][0]).hf
    assert hf is not None
    with torch.device("meta"):
        names = {name: hf.name(name) for name, _ in Decoder(args).named_parameters()}
    theirs = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert set(names.values()) == set(theirs)
    return {ours: theirs[name] for ours, name in names.items()}


def our_model(family: str, model: Any, folder: Path) -> Decoder:
    """Ours, of the shape in its config.json and with its weights."""
    write_config(model, folder)
    args = read_args(family, folder)
    ours = Decoder(args)
    ours.load_state_dict(renamed_weights(family, model, args))
    return ours
