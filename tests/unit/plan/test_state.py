"""The plan's account of a whole step against the real one: FSDP2, clipping and AdamW as rank 0 of 8 on torch's
fake process group, real tensors on a CPU."""

from __future__ import annotations

import dataclasses
import multiprocessing
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan_lc.config.job_config import JobConfig
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.plan.hardware import TABLE, Cluster
from torchtitan_lc.plan.job import Job, PlannedModel, make_job
from torchtitan_lc.plan.meta import built_on_meta

RANKS = 8
ARGS = DecoderArgs(256, 3, 8, 4, 512, 8192)


class Storages(TorchDispatchMode):
    """Bytes of all storages seen and alive, as large as they are now: FSDP2 resizes its own."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._seen: dict[int, Any] = {}

    def now(self) -> int:
        alive = {key: (ref, s) for key, ref in self._seen.items() if (s := ref()) is not None}
        self._seen = {key: ref for key, (ref, _) in alive.items()}
        return sum(s.nbytes() for _, s in alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its own dispatch calls this mode for the shards
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                key = storage._cdata
                if self._seen.get(key, lambda: None)() is None:
                    self._seen[key] = weakref.ref(storage)
        self.peak = max(self.peak, self.now())
        return result


def job(settings: dict[str, Any]) -> Job:
    config = JobConfig()
    config.training.seq_len = 512
    config.parallelism.context_parallel_degree = RANKS
    config.attention.kernel = "fa4"
    config.optimizer.implementation = "for-loop"
    args = dataclasses.replace(ARGS, **{k: v for k, v in settings.items() if "." not in k})
    for key, value in settings.items():
        if "." not in key:
            continue
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    model = PlannedModel("test", args, built_on_meta(lambda: Decoder(args)))
    made = make_job(config, model, Cluster(TABLE["h200_141gb"], 1, RANKS))
    return dataclasses.replace(made, kernel="stand-in")


def _steps(cases: dict[str, dict[str, Any]], results: Any) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    results.put({name: _step(settings) for name, settings in cases.items()})


def _step(settings: dict[str, Any]) -> dict[str, int]:
    """Bytes alive at the fullest moment of each part of the second step."""
    from torchtitan_lc.attention.kernels.stand_in import StandIn
    from torchtitan_lc.attention.strategies import make_strategy
    from torchtitan_lc.components.optimizer import build_optimizer
    from torchtitan_lc.distributed.parallel_dims import ParallelDims
    from torchtitan_lc.distributed.reduce import clip_gradients
    from torchtitan_lc.models.decoder.parallelize import parallelize

    planned = job(settings)
    config = planned.config
    dims = ParallelDims(1, planned.dp, planned.cp, planned.ulysses)
    meshes = dims.build("cpu")
    strategy = make_strategy(
        planned.strategy,
        StandIn(),
        ulysses=dims.peers(meshes, "ulysses"),
        ring=dims.peers(meshes, "ring"),
        heads_per_stage=config.attention.heads_per_stage,
        tile_tokens=config.tiling.projection_tokens,
        hold_normed_input=planned.hold_normed_input,
        sum_kv_gradients=planned.sum_kv_gradients,
        overlap_exchange=planned.overlap_exchange,
    )
    with torch.device("meta"):
        model = Decoder(planned.model.args)
    parallelize(model, config, strategy, meshes)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(0)
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    peaks = {}
    for _ in range(2):
        live = Storages()
        with live:
            for p in model.parameters():
                p.to_local().detach()  # type: ignore[attr-defined]
            for state in optimizer.state.values():
                for x in state.values():
                    (x.to_local() if isinstance(x, DTensor) else x).detach()
            peaks["between steps"] = live.now()
            for _ in range(planned.accumulation):
                live.peak = 0
                tokens, labels = (torch.randint(0, 64, (1, planned.tokens)) for _ in range(2))
                positions = torch.arange(planned.tokens).view(1, -1)
                loss = model(tokens, positions, labels, None)
                del tokens, positions, labels
                peaks["forward"] = live.peak
                live.peak = 0
                loss.backward()
                peaks["backward"] = live.peak
            live.peak = 0
            clip_gradients(model.parameters(), 1.0)
            optimizer.step()
            peaks["optimizer"] = live.peak
            optimizer.zero_grad(set_to_none=True)
    return peaks


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_embeddings": True},
    "reshard always": {"parallelism.fsdp_reshard_after_forward": "always"},
    "never": {"parallelism.fsdp_reshard_after_forward": "never"},
    "bf16 sums": {
        "activation_checkpoint.mode": "full",
        "training.mixed_precision_reduce": "bfloat16",
    },
    "longer rows": {"training.seq_len": 8192, "tiling.loss_tokens": 128},
    "accumulation": {"training.global_batch_size": 2},
    "blocks": {"vocab_size": 64, "hidden_dim": 2048},
    "blocks and rows": {"vocab_size": 64, "hidden_dim": 2048, "training.seq_len": 4096},
    "rows": {"vocab_size": 64, "tiling.mlp_tokens": 128, "training.seq_len": 32768},
    "rows, tied, some layers": {
        "vocab_size": 64,
        "tie_embeddings": True,
        "tiling.mlp_tokens": 128,
        "training.seq_len": 32768,
        "activation_checkpoint.selective_layers": 1,
    },
}


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, int]]:
    """All cases in a process of their own, which leaves no process group behind."""
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    worker = context.Process(target=_steps, args=(CASES, results))
    worker.start()
    got: dict[str, dict[str, int]] = results.get(timeout=400)
    worker.join()
    return got


@pytest.mark.parametrize("name", CASES)
def test_a_step_holds_what_the_plan_says(name: str, measured: dict[str, dict[str, int]]) -> None:
    from torchtitan_lc.plan.activations import Activations
    from torchtitan_lc.plan.moments import planned_moments
    from torchtitan_lc.plan.state import Sharded

    got, planned = measured[name], job(CASES[name])
    state = Sharded(planned)
    moments = planned_moments(planned, Activations(planned), state)
    want = {
        "between steps": sum(state.between_steps().values()),
        "forward": max(m.total for m in moments[:3]),
        "backward": max(m.total for m in moments[3:-1]),
        "optimizer": moments[-1].total,
    }
    for part, size in want.items():
        assert -0.01 <= size / got[part] - 1 <= 0.03, f"{part}: {got[part]:,}, planned {size:,}"
