"""Memory of one GPU as measure after measure is added, and against the length of the rows: `--plan.ladder`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.plan.changes import Settings, changed
from torchtitan_lc.plan.hardware import GIB, Cluster
from torchtitan_lc.plan.job import PlannedModel
from torchtitan_lc.plan.planner import Plan, make_plan
from torchtitan_lc.plan.report import tokens
from torchtitan_lc.plan.terms import Term
from torchtitan_lc.tools.errors import UserError

_STATE = ("parameters", "gradients", "Adam moments", "optimizer temporaries")
_GATHERED = ("gathered weights", "reduce buffers", "weight gradients")
_KEPT = ("block inputs", "attention outputs", "h1")
_TILES = ("MLP tile", "projection tile", "loss tile and head gradients")
GROUPS = ("model state", "gathered weights", "kept for backward", "one tile", "one block at work",
          "beside tensors")  # fmt: skip

_LEAN: Settings = {
    "attention.hold_normed_input": False,
    "attention.sum_kv_gradients": False,
    "attention.overlap_exchange": False,
    "activation_offload.early_fetch": False,
}
_NO_TILES: Settings = {f"tiling.{part}_tokens": 0 for part in ("projection", "mlp", "loss")}
_TILED: Settings = {
    "tiling.projection_tokens": 16384,
    "tiling.mlp_tokens": 4096,
    "tiling.loss_tokens": 2048,
}
# Each adds to the one before it.
_RUNGS: tuple[tuple[str, Settings], ...] = (
    ("plain", {**_LEAN, **_NO_TILES, "attention.strategy": "local",
               "activation_checkpoint.mode": "none", "activation_checkpoint.block_inputs_every": 1,
               "activation_offload.enable": False, "optimizer.offload_state": False,
               "training.enable_cpu_offload": False, "parallelism.context_parallel_degree": 1,
               "parallelism.data_parallel_shard_degree": 1,
               "parallelism.context_parallel_ulysses_degree": -1}),
    ("+ FSDP", {"parallelism.data_parallel_shard_degree": -1}),
    ("+ Ulysses", {"attention.strategy": "ulysses"}),
    ("+ checkpointing", {"activation_checkpoint.mode": "full"}),
    ("+ offload", {"activation_offload.enable": True}),
    ("+ tiling", _TILED),
    ("+ UPipe", {"attention.strategy": "upipe", "attention.heads_per_stage": 1}),
    ("+ selective", {"activation_checkpoint.mode": "selective",
                     "activation_checkpoint.selective_layers": "auto"}),
)  # fmt: skip
_FULL: Settings = {"activation_checkpoint.mode": "full", "activation_offload.enable": False}
_OFFLOAD: Settings = {
    "activation_checkpoint.mode": "selective",
    "activation_offload.enable": True,
}
_CURVES: tuple[tuple[str, Settings], ...] = (
    ("Ulysses, full", {"attention.strategy": "ulysses", **_FULL}),
    ("UPipe, full", {"attention.strategy": "upipe", **_FULL}),
    ("ring, offload", {"attention.strategy": "ring", **_OFFLOAD}),
    ("Ulysses, offload", {"attention.strategy": "ulysses", **_OFFLOAD}),
    ("UPipe, offload", {"attention.strategy": "upipe", **_OFFLOAD}),
    ("UPipe, offload, every 2nd input, moments on the host",
     {"attention.strategy": "upipe", **_OFFLOAD, "optimizer.offload_state": True,
      "activation_checkpoint.block_inputs_every": 2}),
)  # fmt: skip
_LENGTHS = tuple(2**20 * n // 8 for n in (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96))


@dataclass(frozen=True)
class Rung:
    """What one GPU would hold, in GiB by group, and what a step would take."""

    name: str
    groups: dict[str, float]
    host_gib: float
    seconds: float
    fits: bool

    @property
    def gib(self) -> float:
        return sum(self.groups.values())


def rungs(config: JobConfig, model: PlannedModel, cluster: Cluster) -> Iterator[Rung]:
    """One measure after another for the rows of ``config`` on all GPUs."""
    settings: Settings = {}
    for name, more in _RUNGS:
        settings = {**settings, **more}
        if name == "plain":
            settings["parallelism.data_parallel_replicate_degree"] = cluster.gpus
        elif name == "+ FSDP":
            settings["parallelism.data_parallel_replicate_degree"] = 1
        elif name == "+ Ulysses":
            settings["parallelism.context_parallel_degree"] = cluster.gpus
        yield _rung(name, make_plan(changed(config, settings), model, cluster))


def _rung(name: str, plan: Plan) -> Rung:
    groups = dict.fromkeys(GROUPS, 0.0)
    for term in plan.peak.terms:
        groups[_group(term)] += term.size / GIB
    groups["beside tensors"] += plan.reserve.total / GIB
    return Rung(name, groups, plan.host.total / GIB, plan.time.seconds, plan.fits)


def _group(term: Term) -> str:
    for names, group in zip((_STATE, _GATHERED, _KEPT, _TILES), GROUPS, strict=False):
        if term.name in names:
            return group
    return "one block at work"


def curves(
    config: JobConfig, model: PlannedModel, cluster: Cluster
) -> dict[str, list[tuple[int, float]]]:
    """By strategy: (tokens of a row, GiB of a GPU), on all GPUs, without buffers that buy time."""
    found: dict[str, list[tuple[int, float]]] = {}
    for name, settings in _CURVES:
        common: Settings = {
            **_LEAN,
            **_TILED,
            "attention.heads_per_stage": 1,
            "optimizer.offload_state": False,
            "activation_checkpoint.block_inputs_every": 1,
            "parallelism.context_parallel_degree": cluster.gpus,
        }
        points = found[name] = []
        for length in _LENGTHS:
            all_of_it = {**common, **settings, "training.seq_len": length}
            plan = make_plan(changed(config, all_of_it), model, cluster)
            points.append((length, plan.gpu_bytes / GIB))
    return found


def draw(config: JobConfig, model: PlannedModel, cluster: Cluster, path: Path) -> None:
    """Write the picture, and its data beside it as JSON. Raises UserError where matplotlib is missing, or
    knows no such picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            f"plan.ladder = {str(path)!r} draws with matplotlib, which is not installed: pip install "
            "matplotlib"
        ) from error
    figure = Figure(figsize=(12, 5), layout="constrained")
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in kinds:
        raise UserError(
            f"plan.ladder = {str(path)!r}: no picture ends in {path.suffix!r}; name a file that ends in "
            f"one of {', '.join(f'.{kind}' for kind in sorted(kinds))}"
        )
    ladder, lengths = list(rungs(config, model, cluster)), curves(config, model, cluster)
    memory = cluster.hardware.memory_gib
    title = (
        f"{config.model.name} {config.model.flavor} on {cluster.nodes} x {cluster.gpus_per_node} "
        f"{cluster.hardware.name}, planned"
    )
    data: dict[str, Any] = {
        "title": title,
        "seq_len": config.training.seq_len,
        "memory_gib": memory,
        "ladder": [
            {"name": r.name, "gib": r.gib, **r.groups, "host_gib": r.host_gib, "seconds": r.seconds}
            for r in ladder
        ],
        "lengths": lengths,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    left, right = figure.subplots(1, 2)
    bottoms = [0.0] * len(ladder)
    for group in GROUPS:
        sizes = [r.groups[group] for r in ladder]
        left.barh([r.name for r in ladder], sizes, left=bottoms, label=group)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    shown = 4 * memory
    for place, rung in enumerate(ladder):
        left.text(min(rung.gib, shown * 0.87), place, f" {rung.gib:,.0f}", va="center")
    left.set_xlim(0, shown)
    left.invert_yaxis()
    left.set_xlabel(f"GiB of one GPU at its peak, rows of {tokens(config.training.seq_len)}")
    for name, points in lengths.items():
        right.plot([n / 2**20 for n, _ in points], [gib for _, gib in points], label=name)
    right.set_xlabel("tokens of a row, M")
    right.set_ylabel("GiB of one GPU at its peak")
    right.set_ylim(0, 2 * memory)
    left.axvline(memory, color="black", linestyle=":")
    right.axhline(memory, color="black", linestyle=":")
    for axes in (left, right):
        axes.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    print(f"Drawn: {path}, its figures in {path.with_suffix('.json')}")
