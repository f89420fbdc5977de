"""Before training over several ranks: does this machine give the numbers that one rank gives?

A cut-down copy of the model (its heads, head size and width; two layers, a small MLP and vocabulary)
runs a short packed row twice under the job's own settings: spread over the ranks, and whole on every
rank alone. Loss and every parameter's gradient must agree. That covers what tests on another machine
cannot: this driver's kernels, this fabric's exchange, this model's heads on these ranks.

Both runs are sharded by FSDP over all ranks alike, so their collectives match.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.attention.kernels import Kernel
from torchtitan_lc.attention.local import Local
from torchtitan_lc.attention.staged import StagedStrategy
from torchtitan_lc.config.job_config import ActivationOffload, Compile, Float8, JobConfig
from torchtitan_lc.distributed.parallel_dims import Meshes, ParallelDims
from torchtitan_lc.distributed.reduce import sum_over_ranks
from torchtitan_lc.models.spec import Model, ModelSpec
from torchtitan_lc.tools.dtypes import torch_dtype
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.logging import logger

_TOKENS = 384
# Largest difference of a gradient, over its norm. A head that meets another's keys, a lost token or a
# wrong position changes attention's gradients by about their own size.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def self_check(
    config: JobConfig,
    spec: ModelSpec,
    args: Any,
    strategy: StagedStrategy,
    kernel: Kernel,
    dims: ParallelDims,
    meshes: Meshes,
    device: torch.device,
) -> None:
    """Collective over all ranks. Raises UserError that says what differs by how much."""
    began = time.perf_counter()
    rank = dist.get_rank()
    # Compiling the copy would take longer than everything else here; it fits the device. Float8 scales by
    # what a tile holds, so its rounding differs between the two runs. Where kept tensors lie changes no
    # bit, unless layers share their host buffers for a measurement.
    on_device = dataclasses.replace(config.training, enable_cpu_offload=False)
    few = dataclasses.replace(config.activation_checkpoint, selective_layers="auto")
    config = dataclasses.replace(
        config,
        compile=Compile(),
        float8=Float8(),
        training=on_device,
        activation_checkpoint=few,
        activation_offload=ActivationOffload(),
    )
    small = spec.shrink(args)
    row = _packed_row(strategy.layout.multiple, small.vocab_size)
    documents = Documents.from_positions(row["positions"])

    def run(strategy: StagedStrategy, mine: dict[str, Tensor], copies: int) -> Any:
        """Loss and gradients, of one copy of the row, where ``copies`` run at the same time."""
        with torch.device("meta"):
            module = spec.build(small)
        spec.parallelize(module, config, strategy, meshes)
        module.to_empty(device=device)
        model = cast(Model, module)
        with torch.no_grad():
            model.init_weights(seed=config.debug.seed)
        batch = {name: x.to(device) for name, x in mine.items()}
        loss = model(batch["tokens"], batch["positions"], batch["labels"], documents)
        (loss / copies).backward()
        return (sum_over_ranks(loss) / copies).item(), _gradients(module)

    spread = strategy.layout.shard(row, dims.cp_rank(rank))
    got_loss, got = run(strategy, spread, copies=dims.dp)
    alone = Local(kernel, tile_tokens=strategy.tile_tokens)
    want_loss, want = run(alone, row, copies=dims.world_size)
    _compare(got_loss, want_loss, got, want, torch_dtype(config.training.mixed_precision_param))
    logger.info(
        f"Self-check: {strategy.name} over {dims.cp} ranks equals one rank "
        f"({time.perf_counter() - began:.1f} s)"
    )


def _packed_row(multiple: int, vocab_size: int) -> dict[str, Tensor]:
    """A row of random tokens in four documents, one of a single token; the same on every rank."""
    length = -(-_TOKENS // multiple) * multiple
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (1, length + 1), generator=generator)
    bounds = [0, length // 5, length // 5 + 1, length // 2 + 3, length]
    positions = torch.cat(
        [torch.arange(b - a) for a, b in zip(bounds, bounds[1:], strict=False)]
    ).view(1, -1)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "positions": positions,
    }


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def _norm(x: Tensor) -> float:
    norm = torch.linalg.vector_norm(x.float())
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def _compare(
    got_loss: float,
    want_loss: float,
    got: dict[str, Tensor],
    want: dict[str, Tensor],
    dtype: torch.dtype,
) -> None:
    tolerance = _TOLERANCE[dtype]
    errors = {name: _norm(got[name] - want[name]) / max(_norm(want[name]), 1e-30) for name in want}
    errors["loss"] = abs(got_loss - want_loss) / abs(want_loss)
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    if not wrong:
        return
    worst = sorted(wrong, key=lambda name: -wrong[name])[:5]
    lines = "\n".join(f"  {name}: off by {wrong[name]:.3g} of its size" for name in worst)
    raise UserError(
        f"attention.self_check: context parallelism does not give what one rank gives "
        f"(loss {got_loss:.6f} against {want_loss:.6f}; at most {tolerance} is rounding).\n{lines}\n"
        "Training would be wrong. Try another attention.kernel or attention.strategy to find the part "
        "that fails; attention.self_check = false trains all the same."
    )
