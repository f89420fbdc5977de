"""What a step says: one log line, and the same numbers to metrics.jsonl, TensorBoard and W&B.

    step: 10  loss: 7.1234  grad_norm: 1.2345  memory: 40.12GiB(50.7%)  tps: 5,678
      tflops: 300.12  mfu: 30.35%

Speed is counted per device: the tokens of a row are shared by the ranks of its context-parallel
group, so ``tps = tokens of this rank's rows / seconds / non-data-parallel size``. Doubling that
size at equal speed per device doubles the tokens per second of the row, and leaves tps, tflops and
mfu as they are.

A floating point operation counts when the mathematics needs it: two for each multiply-add of the
matrices forward and four backward, plus attention. What is recomputed to save memory is not counted
(so "mfu", not "hfu"), nor is the embedding, which is a look-up. ``mfu`` takes attention as the full
S x S square, as TorchTitan does, and so comes out nearly twice too high at long context;
``mfu_causal`` takes the half that a causal mask leaves. Both are percentages.

Numbers arrive as Python floats that are already reduced over the ranks.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchtitan_lc.components.device_memory import DeviceMemory, MemoryUse
from torchtitan_lc.components.metric_writers import JsonLines, Writer, build_writers
from torchtitan_lc.components.progress import ProgressBar
from torchtitan_lc.tools.logging import logger

if TYPE_CHECKING:
    from torchtitan_lc.config.job_config import Metrics as MetricsConfig

# What each field of the line is printed in, in TorchTitan's order, and how to stop.
_COLOURS = {
    "step": "\033[31m",
    "loss": "\033[32m",
    "grad_norm": "\033[38;2;180;60;0m",
    "memory": "\033[36m",
    "tps": "\033[34m",
    "tflops": "\033[38;2;0;170;170m",
    "mfu": "\033[35m",
}
_RESET = "\033[39m"


def flops_per_token(
    n_params_without_embedding: int, n_layers: int, n_heads: int, head_dim: int, seq_len: int
) -> tuple[float, float]:
    """Floating point operations per token, forward and backward: (full square, causal).

    6 N for the N parameters that multiply, and 12 L H D S for scores and weighted sums over all S
    keys of all H query heads (fewer KV heads change nothing: each query head meets S keys). Causal
    halves that second term only.
    """
    matrices = 6.0 * n_params_without_embedding
    attention = 12.0 * n_layers * n_heads * head_dim * seq_len
    return matrices + attention, matrices + attention / 2


class MetricsProcessor:
    """Counts tokens and seconds between log lines, and says what they amount to.

    rank:           global rank; only rank 0 writes files, all ranks log the line.
    device:         where memory is watched ("cuda": the allocator's peak; "cpu": resident set).
    peak_flops:     of one device in FLOP/s, or None where unknown: then mfu is null.
    flops:          per token, (full square, causal), from ``flops_per_token``.
    non_dp_size:    ranks that share one row.
    start_step:     completed steps, 0 for a new run; what files hold of later steps is dropped.
    config_to_show: the resolved config, for W&B.

    Per step call ``add`` once per micro-batch, then ``step_done``; when ``should_log(step)``, call
    ``log`` in between. Use it as a context manager, or ``close`` it, to release the terminal.
    """

    def __init__(
        self,
        config: MetricsConfig,
        dump_folder: str | Path,
        *,
        rank: int,
        device: torch.device,
        peak_flops: float | None,
        flops: tuple[float, float],
        non_dp_size: int,
        total_steps: int,
        start_step: int = 0,
        config_to_show: dict[str, Any] | None = None,
    ) -> None:
        self.log_freq = config.log_freq
        self._peak_flops = peak_flops
        self._flops_full, self._flops_causal = flops
        self._non_dp_size = non_dp_size
        self._coloured = not config.disable_color_printing and sys.stderr.isatty()
        self._memory = DeviceMemory(device)
        self._writers: list[Writer] = build_writers(
            config, Path(dump_folder), rank, start_step, config_to_show or {}
        )
        self._json = JsonLines(Path(dump_folder), start_step) if rank == 0 else None
        self._bar = ProgressBar(total_steps, start_step, enabled=rank == 0)
        self._last_logged = start_step
        self._restart_counting()

    def __enter__(self) -> MetricsProcessor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def should_log(self, step: int) -> bool:
        return step == 1 or step % self.log_freq == 0

    def add(self, n_tokens: int, data_seconds: float) -> None:
        """Count one micro-batch: the labels in this rank's whole rows (before they are cut over
        ``non_dp_size`` ranks), and the seconds spent waiting for them."""
        self._tokens += n_tokens
        self._data_seconds += data_seconds

    def log(
        self,
        step: int,
        *,
        loss: float,
        max_loss: float,
        grad_norm: float,
        lr: float,
        n_tokens_seen: int,
        extra: dict[str, float] | None = None,
    ) -> dict[str, float | None]:
        """Say what happened since the last line; return what goes to metrics.jsonl.

        loss and max_loss: mean over live labels of all ranks, and the largest of the ranks' means.
        lr: the rate that this step used. n_tokens_seen: of the whole job, over all runs of it.
        extra: more names for TensorBoard and W&B. ``time_s`` in the result is seconds per step.
        """
        seconds = max(time.perf_counter() - self._began, 1e-9)
        steps = max(step - self._last_logged, 1)
        tps = self._tokens / seconds / self._non_dp_size
        memory = self._memory.peak()
        entry: dict[str, float | None] = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tps": tps,
            "tflops": self._flops_full * tps / 1e12,
            "mfu": self._share_of_peak(self._flops_full * tps),
            "mfu_causal": self._share_of_peak(self._flops_causal * tps),
            "memory_gib": memory.reserved_gib,
            "n_tokens_seen": n_tokens_seen,
            "time_s": seconds / steps,
        }
        logger.info(self._line(entry, memory))
        if self._json is not None:
            self._json.write({k: _json_number(v) for k, v in entry.items()})
        named = self._titan_names(entry, memory, max_loss, steps, seconds) | (extra or {})
        for writer in self._writers:
            writer.write(step, {k: v for k, v in named.items() if v is not None})
        self._last_logged = step
        self._memory.restart()
        self._restart_counting()
        return entry

    def step_done(self, step: int) -> None:
        """Move the progress bar, if there is one."""
        self._bar.move_to(step)

    def close(self) -> None:
        self._bar.close()
        for writer in self._writers:
            writer.close()
        if self._json is not None:
            self._json.close()

    def _restart_counting(self) -> None:
        self._tokens = 0
        self._data_seconds = 0.0
        self._began = time.perf_counter()

    def _share_of_peak(self, flops_per_second: float) -> float | None:
        return None if self._peak_flops is None else 100.0 * flops_per_second / self._peak_flops

    def _line(self, entry: dict[str, float | None], memory: MemoryUse) -> str:
        mfu = entry["mfu"]
        fields = {
            "step": f"{entry['step']:2}",
            "loss": f"{entry['loss']:.4f}",
            "grad_norm": f"{entry['grad_norm']:.4f}",
            "memory": f"{memory.reserved_gib:.2f}GiB({memory.reserved_percent:.1f}%)",
            "tps": f"{entry['tps']:,.0f}",
            "tflops": f"{entry['tflops']:,.2f}",
            "mfu": "n/a" if mfu is None else f"{mfu:.2f}%",
        }
        if not self._coloured:
            return "  ".join(f"{name}: {text}" for name, text in fields.items())
        return "  ".join(f"{_COLOURS[k]}{k}: {text}" for k, text in fields.items()) + _RESET

    def _titan_names(
        self,
        entry: dict[str, float | None],
        memory: MemoryUse,
        max_loss: float,
        steps: int,
        seconds: float,
    ) -> dict[str, float | None]:
        return {
            "loss_metrics/global_avg_loss": entry["loss"],
            "loss_metrics/global_max_loss": max_loss,
            "grad_norm": entry["grad_norm"],
            "lr": entry["lr"],
            "n_tokens_seen": entry["n_tokens_seen"],
            "throughput(tps)": entry["tps"],
            "tflops": entry["tflops"],
            "mfu(%)": entry["mfu"],
            "mfu_causal(%)": entry["mfu_causal"],
            "time_metrics/end_to_end(s)": entry["time_s"],
            "time_metrics/data_loading(s)": self._data_seconds / steps,
            "time_metrics/data_loading(%)": 100.0 * self._data_seconds / seconds,
            "memory/max_active(GiB)": memory.active_gib,
            "memory/max_active(%)": memory.active_percent,
            "memory/max_reserved(GiB)": memory.reserved_gib,
            "memory/max_reserved(%)": memory.reserved_percent,
            "memory/num_alloc_retries": memory.alloc_retries,
            "memory/num_ooms": memory.ooms,
        }


def _json_number(value: float | None) -> float | None:
    """JSON has no NaN or infinity; a loss that is not a number becomes null."""
    return value if value is not None and math.isfinite(value) else None
