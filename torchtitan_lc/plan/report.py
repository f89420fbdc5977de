"""A plan in words: what a GPU and a host hold, where the peak is, how long a step takes, and what to change."""

from __future__ import annotations

from collections.abc import Iterable

from torchtitan_lc.config import names
from torchtitan_lc.plan.changes import Change, alternatives, cheapest
from torchtitan_lc.plan.job import PlannedModel
from torchtitan_lc.plan.planner import Plan
from torchtitan_lc.plan.terms import GIB, Moment


def report(plan: Plan, model: PlannedModel) -> str:
    """The whole page."""
    lines = [
        *_heading(plan),
        "",
        *_gpu(plan),
        "",
        *_moments(plan),
        "",
        *_host(plan),
        "",
        *_time(plan),
        "",
        *verdict(plan, model),
    ]
    return "\n".join(lines)


def tokens(n: int) -> str:
    """1048576 -> "1M": binary, as configs write it."""
    for unit, letter in ((2**20, "M"), (2**10, "K")):
        if n >= unit and n % unit == 0:
            return f"{n // unit}{letter}"
    return f"{n:,}"


def _heading(plan: Plan) -> list[str]:
    job, hw = plan.job, plan.job.cluster.hardware
    config = job.config
    spread = f"{job.cp} ranks share a row"
    if job.cp > 1:
        spread += f" (Ulysses {job.ulysses} x ring {job.ring})"
    modes = [layer.mode for layer in job.layers]
    kept = ", ".join(f"{modes.count(m)} {m}" for m in ("none", "selective", "full") if m in modes)
    return [
        f"{config.model.name} {config.model.flavor}, {plan.n_parameters:,} parameters, rows of "
        f"{tokens(config.training.seq_len)} tokens on {job.cluster.nodes} x "
        f"{job.cluster.gpus_per_node} {hw.name}",
        f"  figures of the machine: {hw.source}",
        f"  {spread}; {job.strategy}, {len(job.heads.stages)} stages of "
        f"{job.heads.heads_per_stage} heads; kernel {job.kernel}; layers: {kept}",
        f"  one hidden-state buffer of a rank: B = {job.hidden / GIB:.3f} GiB; normed input "
        f"{'held' if job.hold_normed_input else 'made again'}, gradients of k and v "
        f"{'summed over' if job.sum_kv_gradients else 'sent at each of'} the stages",
    ]


def _gpu(plan: Plan) -> list[str]:
    peak = plan.peak
    lines = [f"Per GPU, GiB, at the peak: {peak.name}"]
    lines += [_row(term.size, term.name, term.owner) for term in peak.largest_first()]
    lines.append(_row(peak.total, "allocated", ""))
    lines += [_row(term.size, term.name, term.owner) for term in plan.reserve.largest_first()]
    lines.append(_row(plan.gpu_bytes, f"of {plan.job.cluster.hardware.memory_gib:.1f}", ""))
    return lines


def _moments(plan: Plan) -> list[str]:
    lines = ["Allocated at each moment of the step, GiB"]
    return lines + [_row(m.total, m.name, "") for m in plan.moments]


def _host(plan: Plan) -> list[str]:
    lines = ["Per host, GiB"]
    lines += [_row(term.size, term.name, "") for term in plan.host.largest_first()]
    lines.append(_row(plan.host.total, f"of {plan.job.cluster.hardware.host_memory_gib:,.0f}", ""))
    return lines


def _row(size: int, name: str, owner: str) -> str:
    return f"  {size / GIB:10,.2f}  {name:34}{owner}".rstrip()


def _time(plan: Plan) -> list[str]:
    time = plan.time
    lines = ["Seconds of a step"]
    lines += [
        f"  {seconds:10,.2f}  {name:26}{100 * seconds / time.seconds:5.1f} %"
        for name, seconds in sorted(time.parts.items(), key=lambda item: -item[1])
        if seconds >= 0.005
    ]
    lines += [
        f"  {time.seconds:10,.2f}  all",
        f"{plan.tokens_per_second:,.0f} tokens/s per GPU, MFU {plan.mfu(False):.1f} % (TorchTitan's "
        f"formula, full square), {plan.mfu(True):.1f} % (causal)",
        f"{plan.hours:,.1f} hours for {plan.job.config.training.steps:,} steps; a checkpoint is "
        f"{plan.checkpoint_bytes / GIB:,.0f} GiB",
        *warnings(plan),
    ]
    return lines


def warnings(plan: Plan) -> list[str]:
    """Time limits that a healthy job would run into: a collective waits for what is queued before it, at
    least for one layer's backward."""
    config, longest = plan.job.config, plan.time.longest_layer
    return [
        f"warning: {key} = {names.get_key(config, key)} is less than twice the {longest:,.0f} s of one "
        f"layer's backward, which a collective may have to wait for: set {enough} or more"
        for key, enough in long_enough(plan).items()
    ]


def long_enough(plan: Plan) -> dict[str, int]:
    """Of the time limits that are too short, by key, one that is not."""
    config, longest = plan.job.config, plan.time.longest_layer
    limits = ("comm.init_timeout_seconds", "comm.train_timeout_seconds")
    too_short = [key for key in limits if names.get_key(config, key) < 2 * longest]
    return dict.fromkeys(too_short, int(4 * longest) + 1)


def verdict(plan: Plan, model: PlannedModel) -> list[str]:
    """Whether it fits, and what to do where it does not."""
    if plan.fits:
        return [
            f"It fits: {plan.gpu_room / GIB:.1f} GiB left per GPU, {plan.host_room / GIB:,.0f} GiB per host."
        ]
    lines = [f"It does not fit: {_missing(plan)}."]
    cluster = plan.job.cluster
    enough = alternatives(plan, model, cluster)
    if enough:
        return [*lines, "One of these makes it fit, the fastest first:", *_changes(enough[:5])]
    steps = cheapest(plan, model, cluster)
    if steps:
        return [*lines, "These together make it fit:", *_changes(steps)]
    return [
        *lines,
        "No change of settings makes it fit: take more GPUs, more host memory or shorter rows.",
    ]


def _missing(plan: Plan) -> str:
    parts = []
    if plan.gpu_room < 0:
        parts.append(f"{-plan.gpu_room / GIB:.1f} GiB too much per GPU")
    if plan.host_room < 0:
        parts.append(f"{-plan.host_room / GIB:,.1f} GiB too much per host")
    return " and ".join(parts)


def _changes(changes: Iterable[Change]) -> list[str]:
    return [f"  {change}" for change in changes]


def comment_block(plan: Plan) -> list[str]:
    """The planned figures of a shipped config, as lines of TOML comment."""
    hw = plan.job.cluster.hardware
    peak: Moment = plan.peak
    largest = ", ".join(f"{t.name} {t.size / GIB:.1f}" for t in peak.largest_first()[:4])
    text = [
        f"Planned for {plan.job.cluster.nodes} x {plan.job.cluster.gpus_per_node} {hw.name}, not measured:",
        f"GPU: {plan.gpu_bytes / GIB:.1f} GiB of {hw.memory_gib:.1f}, of them allocated "
        f"{peak.total / GIB:.1f}.",
        f"Its peak: {peak.name}. Most of it: {largest}.",
        f"Host: {plan.host.total / GIB:,.0f} GiB of {hw.host_memory_gib:,.0f} per node.",
        f"Step: {plan.time.seconds:,.1f} s, {plan.tokens_per_second:,.0f} tokens/s per GPU, MFU "
        f"{plan.mfu(False):.1f} % full square, {plan.mfu(True):.1f} % causal.",
        f"Checkpoint: {plan.checkpoint_bytes / GIB:,.0f} GiB.",
    ]
    return [f"# {line}" for line in text]
