"""Tables of what record_8gpus.py has measured; a part without a good result says why."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from benchmarks.plan_published import SPEED_8B
from benchmarks.record import Record, markdown, number, shown
from torchtitan_lc.config.token_count import parse_token_count

LOSS_BOUND = 2e-3
"""Losses of one model and text, in nats, may differ by so much between strategies in bf16: each is a mean
over all tokens, so what rounding does to single ones averages out. Two kernels under one strategy differed
by at most 4e-4 over four steps, and by 3.7e-3 at the fifth, where a warm-up of five steps had made the loss
jump (llama8b_64k_2xh200_cudnn and _fa4): equal parts have three."""

SCHEDULES = {
    "lean": "upipe, selective, offload, {kernel}, compiled",
    "published": "upipe, full, offload, {published_kernel}",
    "ulysses": "ulysses, full, offload, {published_kernel}",
}


def table(results: Sequence[Record]) -> str:
    """All of them, each under a line that says what it shows."""
    texts = []
    for title, make in _TABLES.items():
        texts.append(f"{title}\n\n{make(results)}")
    return "\n".join(texts)


def speed_table(results: Sequence[Record]) -> str:
    """All layers: speed beside the best published of any method, memory of the fullest GPU and the host."""
    rows = []
    for result, name, part in _parts(results, "lean|published|ulysses"):
        schedule, length = name.rsplit("_", 1)
        _, published, _ = SPEED_8B.get(parse_token_count(length), ("", None, None))
        if (result["ranks"], result["flavor"]) != (8, "8B"):
            published = None
        tps, memory = part.get("tps"), part.get("memory", {})
        over = number(tps["median"] / published) if tps and published else ""
        figures = [shown(part.get("time_s"), 2), shown(tps, 0), number(published, 0), over]
        gib = [number(memory.get(f"{key}_gib"), 1) for key in ("allocated", "reserved", "host")]
        rows.append(
            [length, SCHEDULES[schedule].format_map(result), *figures, *gib, part.get("failed", "")]
        )
    headers = ["length", "schedule", "s per step", "tokens/s per GPU", "published best", "ratio"]
    return markdown([*headers, "allocated, GiB", "reserved", "host", "failed"], rows)


def long_table(results: Sequence[Record]) -> str:
    """The cut model: peak memory beside the plan, and the loss."""
    rows = []
    for _, name, part in _parts(results, "long"):
        _, strategy, length = name.split("_")
        memory, plan, steps = part.get("memory", {}), part.get("plan", {}), part.get("steps", [])
        row = [length, strategy]
        for key in ("allocated_gib", "host_gib"):
            row += [number(memory.get(key), 2), number(plan.get(key), 2)]
        row += [_over(memory.get("allocated_gib"), plan.get("allocated_gib"))]
        row += [number(steps[0]["time_s"] if steps else None, 1), number(plan.get("seconds"), 1)]
        loss = steps[0]["loss"] if steps else None
        rows.append([*row, number(loss, 4), part.get("failed", "")])
    headers = ["length", "strategy", "allocated, GiB", "planned", "host, GiB", "planned"]
    headers += ["measured over planned, GPU", "s (first step)", "planned", "loss", "failed"]
    return markdown(headers, rows)


def plan_table(results: Sequence[Record]) -> str:
    """Every job that ran: the fullest GPU, and the seconds of its steps after the first, beside the plan."""
    rows = []
    for _, name, part in _parts(results, "lean|published|ulysses|equal|long"):
        memory, plan, seconds = part.get("memory"), part.get("plan", {}), part.get("time_s")
        if not memory:
            continue
        row = [f"`{name}`"]
        for measured, planned in (
            (memory.get("allocated_gib"), plan.get("allocated_gib")),
            (seconds["median"] if seconds else None, plan.get("seconds")),
        ):
            both = measured is not None and planned is not None
            off = f"{100 * (planned / measured - 1):+.1f} %" if both else ""
            row += [number(measured, 2), number(planned if both else None, 2), off]
        rows.append(row)
    headers = ["part", "allocated, GiB", "planned", "off by", "s per step", "planned", "off by"]
    return markdown(headers, rows)


def loss_table(results: Sequence[Record]) -> str:
    """Losses of each strategy beside those of ulysses over all ranks."""
    rows = []
    for result, name, part in _parts(results, "equal|long"):
        kind, *_, length = name.split("_")
        reference = result["parts"].get(f"{kind}_ulysses_{length}", {})
        losses = [_losses(entry) for entry in (part, reference)]
        verdict = "no result"
        if all(losses) and len(losses[0]) == len(losses[1]):
            most = max(abs(a - b) for a, b in zip(*losses, strict=True))
            verdict = f"{'equal' if most <= LOSS_BOUND else 'NOT EQUAL'}: {most:.1e}"
        text = " ".join(f"{loss:.4f}" for loss in losses[0])
        rows.append([f"`{name}`", text, verdict])
    bound = f"largest difference from ulysses (bound {LOSS_BOUND:.0e})"
    return markdown(["part", "loss by step", bound], rows)


def exchange_table(results: Sequence[Record]) -> str:
    from benchmarks import exchange

    parts = [part for _, _, part in _parts(results, "exchange")]
    return exchange.table([part for part in parts if "all_to_all" in part])


_TABLES: dict[str, Callable[[Sequence[Record]], str]] = {
    "All layers": speed_table,
    "Long rows, a cut model": long_table,
    "Beside the plan": plan_table,
    "Losses": loss_table,
    "Exchange": exchange_table,
}


def _parts(results: Sequence[Record], kinds: str) -> list[tuple[Record, str, Record]]:
    """Those whose name begins so, by length."""
    wanted = re.compile(rf"({kinds})(_|$)")
    found = [
        (result, name, part)
        for result in results
        for name, part in result["parts"].items()
        if wanted.match(name)
    ]

    def length(item: tuple[Record, str, Record]) -> int:
        *_, last = item[1].split("_")
        return parse_token_count(last) if last[0].isdigit() else 0

    return sorted(found, key=length)


def _losses(part: Record) -> list[float]:
    if "failed" in part:
        return []
    return [line["loss"] for line in part.get("steps", [])]


def _over(measured: float | None, planned: float | None) -> str:
    return number(measured / planned, 3) if measured and planned else ""
