"""Measured beside planned, term by term, in words and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchtitan_lc.dry_run.job import ALLOCATORS, DryJob
from torchtitan_lc.dry_run.measure import Measured
from torchtitan_lc.dry_run.memory import shown
from torchtitan_lc.plan.hardware import GIB
from torchtitan_lc.plan.planner import Plan
from torchtitan_lc.plan.report import tokens
from torchtitan_lc.tools.hardware import device_name

NAME = "dry_run.json"
# Parts of a step, by how their names begin, that take no time where peers are not there, and those that a
# stand-in does not compute.
OF_PEERS = ("exchange", "ring", "FSDP")
OF_ATTENTION = ("attention",)
_FORWARD = ("gathering the weights", "forward of", "loss")


@dataclass(frozen=True)
class Row:
    """One figure: bytes, or seconds."""

    name: str
    measured: float
    planned: float

    @property
    def difference(self) -> float | None:
        """Of the plan from what was measured, in per cent; negative: the plan is too low."""
        return 100 * (self.planned / self.measured - 1) if self.measured else None


def planned_figures(plan: Plan, *, stand_in: bool) -> dict[str, float]:
    """By the names of Measured.figures; of this rank, the host's too."""
    moments = {m.name: m for m in plan.moments}
    update = {t.name: t.size for t in moments["optimizer"].terms}
    state = {name: update.get(name, 0) for name in ("parameters", "gradients", "Adam moments")}
    phases = {"forward": 0, "backward": 0, "optimizer": 0}
    for name, moment in moments.items():
        phase = "forward" if name.startswith(_FORWARD) else "backward"
        phase = "optimizer" if name == "optimizer" else phase
        phases[phase] = max(phases[phase], moment.total)
    cache = sum(t.size for t in plan.reserve.terms if t.name == ALLOCATORS)
    host = {t.name: t.size // plan.job.cluster.gpus_per_node for t in plan.host.terms}
    kept = ("parameters", "gradients", "Adam moments", "offloaded activations")
    absent = OF_PEERS + (OF_ATTENTION if stand_in else ())
    return {
        "parameters": state["parameters"],
        "allocated after building": state["parameters"],
        "gradients": state["gradients"],
        "Adam moments": state["Adam moments"],
        "allocated between steps": state["parameters"] + state["Adam moments"],
        **{f"peak, {phase}": size for phase, size in phases.items()},
        "peak allocated": plan.peak.total,
        "peak reserved": plan.peak.total + cache,
        **{f"host: {name}": host.get(name, 0) for name in kept},
        "step": sum(s for part, s in plan.time.parts.items() if not part.startswith(absent)),
    }


class Comparison:
    def __init__(self, job: DryJob, measured: Measured) -> None:
        self.job, self.measured = job, measured

    @property
    def rows(self) -> list[Row]:
        planned = planned_figures(self.job.plan, stand_in=self.job.stands_in)
        found = self.measured.figures
        if not self.job.rate_known:
            del planned["step"]
        rows = [Row(name, found[name], planned[name]) for name in planned if name in found]
        return [row for row in rows if row.measured or row.planned]

    @property
    def host_room(self) -> int:
        """Bytes left on a node with what was measured of offloaded activations."""
        plan = self.job.plan
        name = "host: offloaded activations"
        planned = planned_figures(plan, stand_in=False)[name]
        more = self.measured.figures.get(name, planned) - planned
        return plan.host_room - int(more) * plan.job.cluster.gpus_per_node

    @property
    def fits(self) -> bool:
        return self.measured.error is None and self.host_room >= 0

    def report(self) -> str:
        lines = [self._heading(), *(f"  {note}" for note in self.job.notes), ""]
        lines.append(f"{'':36}{'measured':>12}{'planned':>12}{'plan is off by':>16}")
        unit = ("GiB", GIB) if self.job.plan.peak.total >= GIB else ("MiB", GIB / 1024)
        lines += [_line(row, *unit) for row in self.rows]
        return "\n".join([*lines, "", *self._verdict()])

    def record(self) -> dict[str, Any]:
        """What `write` writes: bytes and seconds, planned and measured."""
        plan, config = self.job.plan, self.job.config
        return {
            "model": f"{config.model.name} {config.model.flavor}",
            "seq_len": config.training.seq_len,
            "world": plan.job.world,
            "hardware": plan.job.cluster.hardware.name,
            "device": device_name(self.job.device.type),
            "tensors": "fake" if self.job.fake else "real",
            "torch": torch.__version__,
            "kernel": self.job.kernel.kernel.name,
            "host_buffers_shared": config.debug.share_offload_buffers,
            "limit": self.job.limit,
            "steps": config.dry_run.steps,
            "figures": {
                row.name: {
                    "measured": row.measured,
                    "planned": row.planned,
                    "plan_off_by_percent": row.difference,
                }
                for row in self.rows
            },
            "planned_seconds": plan.time.parts,
            "fits": self.fits,
            "ran_out_of_memory": self.measured.error is not None,
            "at": self.measured.at,
            "error": self.measured.error,
            "host_room": self.host_room,
        }

    def write(self, folder: str) -> None:
        path = Path(folder) / NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.record(), indent=1) + "\n", encoding="utf-8")

    def _heading(self) -> str:
        job, config = self.job.plan.job, self.job.config
        return (
            f"Dry run: {config.model.name} {config.model.flavor}, rows of "
            f"{tokens(config.training.seq_len)} tokens, rank 0 of {job.cluster.nodes} x "
            f"{job.cluster.gpus_per_node} {job.cluster.hardware.name}, {config.dry_run.steps} steps on "
            f"{device_name(self.job.device.type)}"
        )

    def _verdict(self) -> Iterator[str]:
        measured, job = self.measured, self.job
        if measured.error is not None:
            yield f"It does not fit: out of memory in {measured.at}."
            yield f"  {measured.error}"
            peak = job.plan.peak
            yield f"  The plan's peak is {shown(peak.total)}, in: {peak.name}."
            return
        most = measured.figures.get("peak reserved", measured.figures["peak allocated"])
        room = (job.limit - most) / GIB
        host = self.host_room / GIB
        if host < 0:
            yield f"It does not fit: {-host:,.1f} GiB too much per host."
            return
        yield f"It fits: {room:.2f} GiB left per GPU, {host:,.0f} GiB per host (planned)."


def _line(row: Row, unit: str, size: float) -> str:
    difference = "" if row.difference is None else f"{row.difference:+.1f} %"
    if row.name == "step":
        name, values = "step without peers, s", (row.measured, row.planned)
    else:
        name, values = f"{row.name}, {unit}", (row.measured / size, row.planned / size)
    figures = "".join(f"{value:>12,.2f}" for value in values)
    return f"  {name:34}{figures}{difference:>16}"
