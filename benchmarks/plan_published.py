"""The plan beside published runs: the tables of docs/planning.md, written anew between their markers.

    python -m benchmarks.plan_published

Published are the figures of Untied Ulysses's authors for H100 of 80 GB, their own and those that they
measured of others; planned is this project on the same GPUs with 2 TiB of host memory per node: the fastest
configuration that fits, and the one that works as theirs does (UPipe, one head per stage, full checkpointing,
block inputs on the host). Takes a minute or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import markdown, tokens
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.plan.changes import Settings, changed
from torchtitan_lc.plan.hardware import GIB, TABLE, Cluster
from torchtitan_lc.plan.job import PlannedModel, planned_model
from torchtitan_lc.plan.planner import Plan, make_plan
from torchtitan_lc.plan.search import fastest, spreads

PAGE = Path(__file__).resolve().parents[1] / "docs" / "planning.md"
K, M = 2**10, 2**20

Speeds = dict[int, tuple[str, float, float | None]]
# Tokens -> (fastest published method, its tokens/s per GPU, that of UPipe; None: out of memory).
SPEED_8B: Speeds = {
    128 * K: ("Ulysses", 2320.47, 2281.05),
    256 * K: ("Ulysses", 1503.80, 1487.29),
    512 * K: ("Ulysses", 878.63, 867.17),
    M: ("Ulysses", 475.33, 472.53),
    2 * M: ("UPipe", 246.07, 246.07),
    3 * M: ("UPipe", 166.32, 166.32),
    4 * M: ("UPipe", 125.56, 125.56),
    5 * M: ("UPipe", 98.25, 98.25),
}
SPEED_32B: Speeds = {
    128 * K: ("Ulysses 8 x ring 2", 545.29, 483.29),
    256 * K: ("Ulysses 8 x ring 2", 370.70, 339.56),
    512 * K: ("Ulysses 8 x ring 2", 217.04, 204.46),
    M: ("Ulysses 8 x ring 2", 117.02, 113.26),
    2 * M: ("Ulysses 8 x ring 2", 59.98, 59.56),
    3 * M: ("UPipe", 40.42, 40.42),
    4 * M: ("UPipe", 29.97, 29.97),
}
# (model, GPUs, tokens, GiB of UPipe, how it is known): m measured, p read from a plot, d derived.
PEAKS: tuple[tuple[str, int, int, float, str], ...] = (
    ("8B", 8, 128 * K, 21.1, "m"),
    ("8B", 8, 3 * M, 51.1, "m"),
    ("8B", 8, 5 * M, 72.0, "d"),
    ("8B", 16, 512 * K, 15.7, "p"),
    ("8B", 16, 2 * M, 26.4, "p"),
    ("8B", 16, 4 * M, 40.8, "p"),
    ("8B", 16, 6 * M, 55.2, "p"),
    ("8B", 16, 8 * M, 69.5, "p"),
    ("32B", 16, 128 * K, 39.98, "m"),
)
HOST_GIB_PER_M = {"8B": 248.0, "32B": 630.0}  # (d) bf16 inputs of all layers but the first
MODELS = {"8B": ("llama3", "8B"), "32B": ("qwen3", "32B")}
AS_THEIRS: Settings = {
    "attention.strategy": "upipe",
    "attention.heads_per_stage": 1,
    "activation_checkpoint.mode": "full",
    "activation_offload.enable": True,
    "tiling.mlp_tokens": 4096,
}


class Planned:
    """Plans of one model on so many H100."""

    def __init__(self, name: str, gpus: int) -> None:
        self.config = JobConfig()
        self.config.model.name, self.config.model.flavor = MODELS[name]
        self.config.parallelism.context_parallel_degree = gpus
        self.model: PlannedModel = planned_model(self.config)
        self.cluster = Cluster(TABLE["h100_80gb"], gpus // 8, 8)

    def fastest(self, seq_len: int) -> Plan | None:
        """With heads exchanged inside a node, or nothing but a ring."""
        config = changed(self.config, {"training.seq_len": seq_len})
        key = "parallelism.context_parallel_ulysses_degree"
        among = [s for s in spreads(config, self.model, self.cluster) if s[key] in (1, 4, 8)]
        return fastest(config, self.model, self.cluster, among)

    def as_theirs(self, seq_len: int) -> Plan:
        settings = {**AS_THEIRS, "training.seq_len": seq_len}
        return make_plan(changed(self.config, settings), self.model, self.cluster)


def speed_table(name: str, gpus: int, speeds: Speeds) -> str:
    planned = Planned(name, gpus)
    headers = [
        "tokens",
        "best published",
        "tokens/s per GPU",
        "UPipe's",
        "planned, fastest that fits",
    ]
    headers += ["tokens/s per GPU", "of the best published", "GPU, GiB", "host, GiB"]
    rows = []
    for seq_len, (method, best, upipe) in speeds.items():
        plan = planned.fastest(seq_len)
        row = [tokens(seq_len), method, f"{best:,.0f}", "" if upipe is None else f"{upipe:,.0f}"]
        if plan is None:
            rows.append([*row, "none fits", "", "", "", ""])
            continue
        rows.append([*row, _words(plan), *_figures(plan, best)])
    return markdown(headers, rows)


def peak_table(peaks: Sequence[tuple[str, int, int, float, str]]) -> str:
    headers = ["model", "GPUs", "tokens", "published UPipe, GiB", "published host, GiB (d)"]
    headers += ["planned likewise, GiB", "planned host, GiB", "larger?"]
    rows = []
    for name, gpus, seq_len, gib, known in peaks:
        plan = Planned(name, gpus).as_theirs(seq_len)
        ours = plan.gpu_bytes / GIB
        host = HOST_GIB_PER_M[name] * seq_len / M
        nodes = plan.job.cluster.nodes
        offloaded = sum(t.size for t in plan.host.terms if t.name == "offloaded activations")
        rows.append(
            [name, str(gpus), tokens(seq_len), f"{gib:.1f} ({known})", f"{host:,.0f}"]
            + [f"{ours:.1f}", f"{nodes * offloaded / GIB:,.0f}"]
            + [f"larger by {ours - gib:.1f}" if ours > gib else f"smaller by {gib - ours:.1f}"]
        )
    return markdown(headers, rows)


def _words(plan: Plan) -> str:
    job, ac = plan.job, plan.job.config.activation_checkpoint
    text = (
        f"{job.strategy}:{job.heads.heads_per_stage}" if job.strategy == "upipe" else job.strategy
    )
    if job.ring > 1 and job.ulysses > 1:
        text += f", {job.ulysses} x {job.ring}"
    kept = sum(layer.mode == "selective" for layer in job.layers)
    text += f", {kept} of {len(job.layers)} layers selective"
    text += ", offload" * job.offload
    return text + (f", every {ac.block_inputs_every}" if ac.block_inputs_every > 1 else "")


def _figures(plan: Plan, best: float) -> list[str]:
    ratio = plan.tokens_per_second / best
    verdict = f"{ratio:.2f}" + (", slower" if ratio < 1 else "")
    return [
        f"{plan.tokens_per_second:,.0f}",
        verdict,
        f"{plan.gpu_bytes / GIB:.1f}",
        f"{plan.host.total * plan.job.cluster.nodes / GIB:,.0f}",
    ]


def with_table(text: str, name: str, table: str) -> str:
    """``text`` with ``table`` between its markers of that name. Raises ValueError where they are missing."""
    first, last = f"<!-- planned: {name} -->", f"<!-- end of planned: {name} -->"
    before, found, rest = text.partition(first)
    _, ended, after = rest.partition(last)
    if not found or not ended:
        raise ValueError(f"no markers of {name!r}")
    return f"{before}{first}\n\n{table.strip()}\n\n{last}{after}"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    text = with_table(text, "8B on 8", speed_table("8B", 8, SPEED_8B))
    text = with_table(text, "32B on 16", speed_table("32B", 16, SPEED_32B))
    text = with_table(text, "peaks", peak_table(PEAKS))
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
