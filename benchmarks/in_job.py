"""What benchmarks add to a job through experimental.custom_import, in each of its processes.

Models cut to their first layers, so that a step at millions of tokens ends in minutes: model.name
"llama3_cut" and model.flavor "8B-2" are Llama 3 8B with 2 layers; likewise "qwen3_cut" "32B-8", and every
other built-in model, flavor and number of layers.

Where BENCH_MEMORY_FOLDER names a folder, every rank adds a line to rank<r>.jsonl there after each optimizer
step: peak of allocated and reserved GPU memory since the last logged step, and the largest resident set that
its process has had (page-locked buffers are part of it), in GiB.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.bench_train import MEMORY_FOLDER
from torchtitan_lc.models.spec import BUILT_IN, ModelSpec, get_model, register_model

GIB = 2**30


def cut(spec: ModelSpec) -> ModelSpec:
    """The same model with fewer layers, as every "FLAVOR-LAYERS"."""
    flavors = {
        f"{flavor}-{layers}": dataclasses.replace(args, n_layers=layers)
        for flavor, args in spec.flavors.items()
        for layers in range(1, args.n_layers)
    }
    return dataclasses.replace(spec, name=f"{spec.name}_cut", flavors=flavors)


class MemoryLines:
    """An optimizer hook that writes down what memory this rank has used."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"rank{os.environ.get('RANK', '0')}.jsonl"

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        line = {"host_gib": kib * 1024 / GIB}
        if torch.cuda.is_available():
            line["allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
            line["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


for name in BUILT_IN:
    register_model(cut(get_model(name)))
if MEMORY_FOLDER in os.environ:
    register_optimizer_step_post_hook(MemoryLines(Path(os.environ[MEMORY_FOLDER])))
