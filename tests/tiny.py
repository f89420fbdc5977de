"""A tiny model and the real Trainer around it, for tests that train."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.models.decoder.parallelize import parallelize
from torchtitan_lc.models.decoder.settings import adjust
from torchtitan_lc.models.spec import ModelSpec, register_model
from torchtitan_lc.ops.loss import IGNORE_INDEX

_TINY = DecoderArgs(dim=64, n_layers=2, n_heads=8, n_kv_heads=8, hidden_dim=96, vocab_size=262)
FLAVORS = {
    "mha": _TINY,
    "gqa": dataclasses.replace(_TINY, n_kv_heads=4),
    "gqa2": dataclasses.replace(_TINY, n_kv_heads=2),
    "one_kv": dataclasses.replace(_TINY, n_kv_heads=1),
    "six": dataclasses.replace(_TINY, n_heads=6, n_kv_heads=3, dim=48),
    "seven": dataclasses.replace(_TINY, n_heads=7, n_kv_heads=1, dim=56),
    "tied": dataclasses.replace(_TINY, n_kv_heads=4, tie_embeddings=True),
}


def register_tiny() -> None:
    """Register the model "tiny" in this process (each worker process does it once)."""
    register_model(ModelSpec("tiny", FLAVORS, Decoder, parallelize, adjust))


def tiny_config(settings: dict[str, Any] | None = None) -> JobConfig:
    """The tiny job in fp32 with SGD at rate 1 and no clipping; ``settings`` maps "section.key" to
    values. Tile sizes are odd, so that the last tile of everything is a short one."""
    defaults: dict[str, Any] = {
        "model.name": "tiny",
        "model.flavor": "gqa",
        "training.dataset": "stdlib",
        "training.seq_len": 64,
        "training.steps": 6,
        "training.max_norm": 0.0,
        "training.mixed_precision_param": "float32",
        "optimizer.name": "SGD",
        "optimizer.lr": 1.0,
        "optimizer.weight_decay": 0.0,
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.min_lr_factor": 1.0,
        "tiling.projection_tokens": 13,
        "tiling.mlp_tokens": 7,
        "tiling.loss_tokens": 11,
        "attention.self_check": False,
    }
    config = JobConfig()
    for key, value in {**defaults, **(settings or {})}.items():
        *sections, name = key.split(".")
        target: Any = config
        for section in sections:
            target = getattr(target, section)
        assert hasattr(target, name), key
        setattr(target, name, value)
    return config


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter, by its name; each parameter must have one."""
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert all(grad is not None for grad in found.values()), found
    return {name: grad for name, grad in found.items() if grad is not None}


def masked_rows(rows: int, seq_len: int, seed: int = 0, packed: bool = False) -> dict[str, Tensor]:
    """Random rows whose numbers of live labels differ widely: all but a few, almost none, none in
    one half of the row. packed: each row of several documents, cut differently."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 258, (rows, seq_len + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(rows):
        live = [seq_len - 4, 4, seq_len // 2, 1][row % 4]
        labels[row, : seq_len - live] = IGNORE_INDEX
    positions = torch.arange(seq_len).repeat(rows, 1)
    if packed:
        for row in range(rows):
            for start in (1, 2, seq_len // 4 + row, seq_len // 2, seq_len - 3 - row):
                positions[row, start:] = torch.arange(seq_len - start)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": labels, "positions": positions}


class FixedRows:
    """Stands in for the loader: lane j always gives row j of ``rows``."""

    def __init__(self, rows: dict[str, Tensor]) -> None:
        self.rows = rows

    def next_batch(self, lanes: Sequence[int]) -> dict[str, Tensor]:
        return {name: x[list(lanes)] for name, x in self.rows.items()}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        return None
