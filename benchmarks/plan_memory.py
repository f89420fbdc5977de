"""The planned tables and the picture of docs/memory.md, written anew between their markers.

python -m benchmarks.plan_memory
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.plan_published import with_table
from benchmarks.record import markdown
from torchtitan_lc.config import names
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.values import toml_item
from torchtitan_lc.plan.changes import Settings, changed
from torchtitan_lc.plan.hardware import GIB, TABLE, Cluster
from torchtitan_lc.plan.job import PlannedModel, planned_model
from torchtitan_lc.plan.ladder import GROUPS, draw, rungs
from torchtitan_lc.plan.planner import make_plan

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, PICTURE = DOCS / "memory.md", DOCS / "img" / "ladder_8b_3m.png"

CLUSTER = Cluster(TABLE["h100_80gb"], 1, 8)
LEAN: Settings = {
    "model.name": "llama3",
    "model.flavor": "8B",
    "training.seq_len": 3 * 2**20,
    "parallelism.context_parallel_degree": 8,
    "attention.strategy": "upipe",
    "attention.heads_per_stage": 1,
    "attention.hold_normed_input": False,
    "attention.sum_kv_gradients": False,
    "attention.overlap_exchange": False,
    "activation_checkpoint.mode": "selective",
    "activation_offload.enable": True,
    "activation_offload.early_fetch": False,
    "tiling.mlp_tokens": 4096,
    "tiling.loss_tokens": 2048,
}
CHANGES: tuple[Settings, ...] = (
    {"attention.heads_per_stage": 2},
    {"attention.heads_per_stage": 4},
    {"attention.hold_normed_input": True},
    {"attention.sum_kv_gradients": True},
    {"attention.overlap_exchange": True},
    {"activation_offload.early_fetch": True},
    {"activation_offload.enable": False},
    {"activation_checkpoint.selective_layers": 16},
    {"activation_checkpoint.mode": "full"},
    {"activation_checkpoint.block_inputs_every": 2},
    {"activation_checkpoint.block_inputs_every": 4},
    {"tiling.mlp_tokens": 2048},
    {"tiling.mlp_tokens": 65536},
    {"tiling.projection_tokens": 65536},
    {"tiling.loss_tokens": 8192},
    {"optimizer.offload_state": True},
    {"training.enable_cpu_offload": True},
    {"parallelism.fsdp_reshard_after_forward": "never"},
    {"compile.enable": True},
)


def base() -> tuple[JobConfig, PlannedModel]:
    config = changed(JobConfig(), LEAN)
    return config, planned_model(config)


def ladder_table(config: JobConfig, model: PlannedModel) -> str:
    headers = ["", *GROUPS, "GPU, GiB", "host, GiB", "s per step", "fits"]
    rows = [
        [r.name, *(f"{r.groups[g]:,.1f}" for g in GROUPS), f"{r.gib:,.1f}", f"{r.host_gib:,.0f}"]
        + [f"{r.seconds:,.0f}", "yes" if r.fits else "no"]
        for r in rungs(config, model, CLUSTER)
    ]
    return markdown(headers, rows)


def keys_table(config: JobConfig, model: PlannedModel) -> str:
    before = make_plan(config, model, CLUSTER)
    b = before.job.hidden
    headers = ["key", "from", "to", "GPU, GiB", "GPU, B", "host of a node, GiB", "time"]
    rows = []
    for settings in CHANGES:
        after = make_plan(changed(config, settings), model, CLUSTER)
        ((key, value),) = settings.items()
        gpu, host = after.gpu_bytes - before.gpu_bytes, after.host.total - before.host.total
        slower = 100 * (after.time.seconds / before.time.seconds - 1)
        rows.append(
            [f"`{key}`", toml_item(names.get_key(config, key)), toml_item(value)]
            + [f"{gpu / GIB:+,.1f}", f"{gpu / b:+.2f}", f"{host / GIB:+,.0f}", f"{slower:+.1f} %"]
        )
    return markdown(headers, rows)


def page(text: str) -> str:
    """The page's text with its planned tables as they are now."""
    config, model = base()
    text = with_table(text, "ladder", ladder_table(config, model))
    return with_table(text, "keys", keys_table(config, model))


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    draw(*base(), CLUSTER, PICTURE)


if __name__ == "__main__":
    main()
