"""Tiny Hugging Face folders with random weights, written from their names and shapes alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

# The vocabulary and the 18 rows of K and V divide by neither 2 nor 4.
DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 36, 2, 6, 3, 6, 52, 263
_COMMON: dict[str, Any] = {
    "hidden_size": DIM,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": HIDDEN,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "bfloat16",
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "llama_tied": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
}
NAMES = {"llama": "llama3", "llama_tied": "llama3", "qwen3": "qwen3"}  # model.name


def shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes as Hugging Face has them."""
    q_dim, kv_dim = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, DIM)}
    for i in range(LAYERS):
        layer = {
            "self_attn.q_proj": (q_dim, DIM),
            "self_attn.k_proj": (kv_dim, DIM),
            "self_attn.v_proj": (kv_dim, DIM),
            "self_attn.o_proj": (DIM, q_dim),
            "mlp.gate_proj": (HIDDEN, DIM),
            "mlp.up_proj": (HIDDEN, DIM),
            "mlp.down_proj": (DIM, HIDDEN),
            "input_layernorm": (DIM,),
            "post_attention_layernorm": (DIM,),
        }
        if kind == "qwen3":
            layer |= {"self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,)}
        found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    found["model.norm.weight"] = (DIM,)
    if kind != "llama_tied":
        found["lm_head.weight"] = (VOCAB, DIM)
    return found


def make_folder(path: Path, kind: str, *, files: int = 1) -> dict[str, Tensor]:
    """Write a bf16 folder of ``kind`` in so many files; returns its tensors."""
    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(len(kind))
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)).to(torch.bfloat16)
        for name, shape in shapes(kind).items()
    }
    (path / "config.json").write_text(json.dumps(_COMMON | KINDS[kind]))
    (path / "generation_config.json").write_text('{"eos_token_id": 257}')
    (path / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    write_weights(path, tensors, files=files)
    return tensors


def write_weights(path: Path, tensors: dict[str, Tensor], *, files: int = 1) -> None:
    metadata = {"format": "pt"}
    if files == 1:
        save_file(tensors, path / "model.safetensors", metadata)
        return
    weight_map: dict[str, str] = {}
    for i in range(files):
        name = f"model-{i + 1:05}-of-{files:05}.safetensors"
        part = dict(list(tensors.items())[i::files])
        save_file(part, path / name, metadata)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Every tensor in every safetensors file of a folder."""
    found: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    return found


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names that are in one only, or whose dtype, shape or bytes are not equal."""

    def equal(name: str) -> bool:
        x, y = a[name], b[name]
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        return torch.equal(x.flatten().view(torch.uint8), y.flatten().view(torch.uint8))

    return sorted(n for n in a.keys() | b.keys() if n not in a or n not in b or not equal(n))
