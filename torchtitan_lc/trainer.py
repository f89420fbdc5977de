"""The trainer: builds the parts in the order in which they need each other, then

    batch -> forward_backward -> step -> log

The loss is the sum over live labels divided once by the number of live labels of all micro-batches and
all ranks, counted before the first backward; nothing else scales gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.attention.kernels import Kernel
from torchtitan_lc.attention.layout import Layout
from torchtitan_lc.attention.staged import StagedStrategy
from torchtitan_lc.attention.strategies import make_strategy
from torchtitan_lc.components.agreement import all_or_none, same_on_all
from torchtitan_lc.components.checkpoint import CheckpointManager
from torchtitan_lc.components.data import build_loader
from torchtitan_lc.components.lr_scheduler import build_lr_scheduler
from torchtitan_lc.components.metrics import MetricsProcessor, flops_per_token
from torchtitan_lc.components.optimizer import build_optimizer
from torchtitan_lc.components.tokenizer import Tokenizer, build_tokenizer
from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.config.manager import to_toml
from torchtitan_lc.config.resolve import accumulation_steps, resolve_degrees, resolve_strategy
from torchtitan_lc.distributed.parallel_dims import Meshes, ParallelDims
from torchtitan_lc.distributed.reduce import clip_gradients, max_over_ranks, sum_over_ranks
from torchtitan_lc.distributed.setup import set_timeouts
from torchtitan_lc.memory.activations import releases_memory, resolve
from torchtitan_lc.models.spec import Model, identity
from torchtitan_lc.ops.loss import IGNORE_INDEX
from torchtitan_lc.preflight import (
    attention_shape,
    compute_dtype,
    job_hf,
    job_kernel,
    job_model,
    ulysses_degree,
)
from torchtitan_lc.self_check import self_check
from torchtitan_lc.tools.dtypes import torch_dtype
from torchtitan_lc.tools.errors import UserError
from torchtitan_lc.tools.hardware import (
    describe_device,
    device_name,
    peak_flops,
    versions,
)
from torchtitan_lc.tools.logging import logger
from torchtitan_lc.tools.profiling import StepDone, memory_snapshots, step_traces


@dataclass
class TrainState:
    """Optimizer steps completed and tokens trained on, over the whole job."""

    step: int = 0
    n_tokens_seen: int = 0

    def state_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.n_tokens_seen = int(state["step"]), int(state["n_tokens_seen"])


@dataclass(frozen=True)
class Batch:
    """tokens, positions, labels [b, T] int64 of this rank; documents of the whole rows."""

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    documents: Documents | None

    def to(self, device: torch.device) -> Batch:
        tensors = (self.tokens, self.positions, self.labels)
        tokens, positions, labels = (x.to(device, non_blocking=True) for x in tensors)
        return Batch(tokens, positions, labels, self.documents)


@dataclass(frozen=True)
class StepResult:
    """Of one optimizer step, before it is logged: tensors stay on the device, so that no step waits
    for its numbers. loss_sum, n_labels: this rank's share. grad_norm: global, before clipping."""

    loss_sum: Tensor
    n_labels: int
    n_labels_global: int
    grad_norm: Tensor


class UnreadableRows(UserError):
    """Rows of a step that a rank could not read; raised on all ranks, before the step has begun."""


class Trainer:
    """One rank of a training job, after its process group is up.

    device: this rank's. The config has passed preflight; collective over all ranks.
    """

    def __init__(self, config: JobConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.job_model = job_model(config)
        args = self.job_model.args
        ulysses = ulysses_degree(config, args)
        self.dims = ParallelDims(*resolve_degrees(config, self.world_size), ulysses)
        self.meshes: Meshes = self.dims.build(device.type)

        # Rows: this data-parallel rank owns a fixed set of lanes of the global batch, micro-batch
        # after micro-batch; every context-parallel rank of the group reads the same rows.
        self.accumulation = accumulation_steps(config, self.dims.dp)
        rows = config.training.local_batch_size * self.accumulation
        first = self.dims.dp_rank(self.rank) * rows
        self.lanes = list(range(first, first + rows))
        self.rows_per_step = rows * self.dims.dp
        kernel = job_kernel(config, args, device.type)
        self.strategy = self._build_strategy(kernel.kernel)
        tokenizer = build_tokenizer(config.model.tokenizer, config.model.hf_assets_path)
        self.loader = build_loader(
            config.training,
            tokenizer,
            self.lanes,
            self.rows_per_step,
            multiple=self.strategy.layout.multiple,
        )
        same_on_all(
            {
                "training.dataset": "{name}, {documents:,} documents".format(
                    **self.loader.fingerprint()
                ),
                "model.tokenizer": _described(tokenizer),
            },
            "The ranks read different data. Give every node the same files:",
        )
        self.shape = attention_shape(config, args)
        self.releases_memory = releases_memory(config, self._buffer_bytes(), device)
        self.strategy.check(self.shape)
        if config.attention.self_check and self.dims.cp > 1:
            self_check(
                config,
                self.job_model.spec,
                args,
                self.strategy,
                kernel.kernel,
                self.dims,
                self.meshes,
                device,
            )

        self.module = self._build_model()
        self.model = cast(Model, self.module)
        self.optimizer = build_optimizer(self.module.named_parameters(), config.optimizer)
        self.lr_scheduler = build_lr_scheduler(
            self.optimizer, config.lr_scheduler, config.training.steps
        )
        self.state = TrainState()
        self.checkpointer = CheckpointManager(
            config.checkpoint,
            config.job.dump_folder,
            model=self.module,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            train_state=self.state,
            dataloader=self.loader,
            model_identity=identity(self.job_model.spec, config.model.flavor, args),
            hf=job_hf(config, self.job_model),
        )
        self._log_start(kernel.kernel.name, kernel.reason, tokenizer)

    def _build_strategy(self, kernel: Kernel) -> StagedStrategy:
        """The config's, with "auto" decided by the size of a hidden-state buffer on this device."""
        config, device = self.config, self.device.type
        attention, buffer = config.attention, self._buffer_bytes()
        return make_strategy(
            resolve_strategy(config),
            kernel,
            ulysses=self.dims.peers(self.meshes, "ulysses"),
            ring=self.dims.peers(self.meshes, "ring"),
            heads_per_stage=attention.heads_per_stage,
            tile_tokens=config.tiling.projection_tokens,
            hold_normed_input=resolve(attention.hold_normed_input, buffer, device),
            sum_kv_gradients=resolve(attention.sum_kv_gradients, buffer, device),
            overlap_exchange=resolve(attention.overlap_exchange, buffer, device),
        )

    def _buffer_bytes(self) -> int:
        """Of one hidden-state buffer."""
        training = self.config.training
        tokens = Layout(self.dims.ulysses, self.dims.ring).tokens(training.seq_len)
        itemsize = compute_dtype(self.config).itemsize
        return training.local_batch_size * tokens * self.job_model.args.dim * itemsize

    def _build_model(self) -> nn.Module:
        """Build on the meta device, spread, then materialise and fill only this rank's shards."""
        config, spec = self.config, self.job_model.spec
        with torch.device("meta"):
            module = spec.build(self.job_model.args)
        module.to(torch_dtype(config.training.dtype))
        spec.parallelize(module, config, self.strategy, self.meshes)
        self._fill(module)
        return module.train()

    def _fill(self, module: nn.Module) -> None:
        """Give this rank's shards their memory and their first values."""
        # FSDP2 fetches from the host what lives there.
        on_host = self.config.training.enable_cpu_offload
        module.to_empty(device="cpu" if on_host else self.device)
        with torch.no_grad():
            cast(Model, module).init_weights(self.config.debug.seed)

    # -- the loop

    def train(self) -> None:
        """Resume if there is something to resume, train to `training.steps`, save."""
        config = self.config
        steps = config.training.steps
        start = self.checkpointer.load(steps)
        if start >= steps:
            self.checkpointer.export_if_missing(start)
            # Of a step of weights alone, which no run goes on from, no state is loaded.
            advice = " Set training.steps higher to continue." if self.state.step else ""
            logger.info(f"Training is complete: step {start} of {steps} is done.{advice}")
            return
        self._save_config()
        logger.info(f"Training starts at step {start + 1} of {steps}")
        self._collect_by_hand()
        with self.metrics(start) as metrics, self._profilers() as profilers:
            while self.state.step < steps:
                self._collect_garbage()
                try:
                    result = self.train_step(metrics)
                except UnreadableRows:
                    if self.state.step > start:
                        self.checkpointer.save_out_of_turn(self.state.step)
                    raise
                if metrics.should_log(self.state.step) or self.state.step == steps:
                    self.log_step(metrics, result)
                last = self.state.step == steps
                self.checkpointer.save(self.state.step, last_step=last)
                metrics.step_done(self.state.step)
                for step_done in profilers:
                    step_done()
                if self.state.step == start + 1 and not last:
                    self._shorten_timeouts()
        self.checkpointer.wait()
        logger.info(f"Training completed: {self.state.n_tokens_seen:,} tokens")

    def train_step(self, metrics: MetricsProcessor) -> StepResult:
        """One optimizer step over the global batch."""
        batches, n_labels, n_labels_global = self._next_batches(metrics)
        if self.releases_memory:
            torch.cuda.empty_cache()

        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        while batches:
            batch = batches.pop(0).to(self.device)
            loss = self.model(batch.tokens, batch.positions, batch.labels, batch.documents)
            del batch
            (loss / max(n_labels_global, 1)).backward()
            loss_sum += loss.detach()

        parameters = [p for p in self.module.parameters() if p.requires_grad]
        grad_norm = clip_gradients(parameters, self.config.training.max_norm)
        if n_labels_global:
            self.optimizer.step()
        else:
            # Weight decay and Adam's moments would move on a step that has trained nothing.
            logger.warning(f"Step {self.state.step + 1} has no live label: weights are left alone")
        self.lr_scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.state.step += 1
        self.state.n_tokens_seen += self.rows_per_step * self.config.training.seq_len
        return StepResult(loss_sum, n_labels, n_labels_global, grad_norm)

    def _next_batches(self, metrics: MetricsProcessor) -> tuple[list[Batch], int, int]:
        """The step's micro-batches, their live labels, and the live labels of all ranks.

        Raises UnreadableRows on every rank where one rank cannot read its rows: the others would wait for
        it, and what it has to say would stay in its own log. The data then stands where the step began.
        """
        batches, problem = [], None
        began = self.loader.state_dict()
        try:
            batches = [self._next_batch(i, metrics) for i in range(self.accumulation)]
        except UserError as error:
            problem = str(error)
        n_labels = sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches)
        # Counted and summed on the host, so that no rank waits for its device here.
        mine = torch.tensor([n_labels, problem is not None])
        n_labels_global, n_problems = sum_over_ranks(mine).tolist()
        if n_problems:
            self.loader.load_state_dict(began)
            try:
                all_or_none(problem)
            except UserError as error:
                raise UnreadableRows(str(error)) from error
        return batches, n_labels, n_labels_global

    def _next_batch(self, index: int, metrics: MetricsProcessor) -> Batch:
        """This rank's part of the rows of micro-batch ``index``, on the host."""
        began = time.perf_counter()
        size = self.config.training.local_batch_size
        rows = self.loader.next_batch(self.lanes[index * size : (index + 1) * size])
        metrics.add(size * self.config.training.seq_len, time.perf_counter() - began)
        documents = Documents.from_positions(rows["positions"])
        shard = self.strategy.layout.shard(rows, self.dims.cp_rank(self.rank))
        return Batch(shard["tokens"], shard["positions"], shard["labels"], documents)

    # -- saying what happens

    def log_step(self, metrics: MetricsProcessor, result: StepResult) -> dict[str, float | None]:
        """Reduce the step's numbers over all ranks and log them; returns what was logged."""
        total = sum_over_ranks(result.loss_sum) / max(result.n_labels_global, 1)
        # The mean over a rank's own labels; a rank without live labels has none, and counts as 0.
        worst = max_over_ranks(result.loss_sum / max(result.n_labels, 1))
        return metrics.log(
            self.state.step,
            loss=total.item(),
            max_loss=worst.item(),
            grad_norm=result.grad_norm.item(),
            lr=self._last_lr(),
            n_tokens_seen=self.state.n_tokens_seen,
        )

    def _last_lr(self) -> float:
        """The rate of the step just done; the scheduler already stands at the next one. It counts for
        itself: a checkpoint can be loaded without it."""
        scheduler = self.lr_scheduler
        done = scheduler.last_epoch - 1
        return float(scheduler.lr_lambdas[0](done)) * float(scheduler.base_lrs[0])

    def metrics(self, start: int) -> MetricsProcessor:
        args = self.job_model.args
        # The embedding lookup multiplies nothing; a tied table is used as the output matrix, and counts.
        table = 0 if getattr(args, "tie_embeddings", False) else args.vocab_size * args.dim
        flops = flops_per_token(
            self._n_params() - table,
            args.n_layers,
            args.n_heads,
            args.head_dim,
            self.config.training.seq_len,
        )
        return MetricsProcessor(
            self.config.metrics,
            self.config.job.dump_folder,
            rank=self.rank,
            device=self.device,
            peak_flops=peak_flops(device_name(self.device.type)),
            flops=flops,
            non_dp_size=self.dims.cp,
            total_steps=self.config.training.steps,
            start_step=start,
            config_to_show=dataclasses.asdict(self.config),
        )

    def _n_params(self) -> int:
        return sum(p.numel() for p in self.module.parameters())

    def _log_start(self, kernel: str, reason: str, tokenizer: Tokenizer) -> None:
        config, dims = self.config, self.dims
        found = ", ".join(f"{name} {version}" for name, version in versions().items())
        logger.info(f"{config.job.description}: {found}")
        logger.info(
            f"Mesh: dp_replicate {dims.dp_replicate} x dp_shard {dims.dp_shard} x cp {dims.cp} = "
            f"{self.world_size} ranks"
        )
        logger.info(
            f"Model {config.model.name} {config.model.flavor}: {self._n_params():,} parameters, "
            f"sharded over {dims.dp_shard * dims.cp} ranks"
        )
        logger.info(f"Attention: {self.strategy.describe(self.shape)}; kernel {kernel} ({reason})")
        logger.info(
            f"Step: {self.rows_per_step} rows of {config.training.seq_len:,} tokens, "
            f"{self.accumulation} micro-batches of {config.training.local_batch_size} rows for each of "
            f"{self.dims.dp} data-parallel groups"
        )
        training, data = config.training, self.loader.fingerprint()
        count = f"{data['documents']:,} documents" if data["documents"] else "a stream"
        logger.info(f"Data: {data['name']}, {count}; tokenizer {_described(tokenizer)}")
        float8 = config.float8
        numbers = [
            f"weights {training.dtype}, forward and backward {training.mixed_precision_param}"
        ]
        if float8.enable:
            but = f" but for {', '.join(float8.filter_fqns)}" if float8.filter_fqns else ""
            numbers.append(f"the blocks' products in float8 ({float8.recipe_name}){but}")
        numbers.append(
            f"compiled by {config.compile.backend}" if config.compile.enable else "not compiled"
        )
        logger.info(f"Numbers: {'; '.join(numbers)}")
        logger.info(f"Device: {describe_device(self.device.type)}")

    # -- housekeeping

    def _save_config(self) -> None:
        if self.rank == 0:
            folder = Path(self.config.job.dump_folder)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.toml").write_text(to_toml(self.config), encoding="utf-8")

    @contextlib.contextmanager
    def _profilers(self) -> Iterator[list[StepDone]]:
        where = (self.config.profiling, self.config.job.dump_folder, self.rank)
        first, device = self.state.step + 1, self.device.type
        with (
            step_traces(*where, first, device) as traced,
            memory_snapshots(*where, first, device) as snapped,
        ):
            yield [traced, snapped]

    def _shorten_timeouts(self) -> None:
        """After the first step, which compiles and opens connections, a rank that hangs is noticed
        sooner."""
        set_timeouts(self.meshes.groups(), self.config.comm.train_timeout_seconds)

    def _collect_by_hand(self) -> None:
        """Collect on all ranks at the same steps: a collection at a moment of its own stalls the
        others at the next collective."""
        gc.collect()
        gc.disable()

    def _collect_garbage(self) -> None:
        if self.state.step % self.config.training.gc_freq == 0:
            gc.collect(1)

    def close(self) -> None:
        """Finish background work; also after a failure."""
        self.checkpointer.close()
        self.loader.close()
        gc.enable()


def _described(tokenizer: Tokenizer) -> str:
    return f"{type(tokenizer).__name__} of {tokenizer.vocab_size:,} tokens"
