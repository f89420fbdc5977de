"""FSDP2, meshes and reductions around the model: what is counted, summed and sharded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import run_distributed
from tests.reference import reference_step
from tests.tiny import FLAVORS, FixedRows, gradients, masked_rows, register_tiny, tiny_config
from torchtitan_lc.distributed.fsdp import sum_gradients
from torchtitan_lc.distributed.parallel_dims import ParallelDims
from torchtitan_lc.distributed.reduce import clip_gradients, global_grad_norm, sum_over_ranks
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.ops.loss import IGNORE_INDEX
from torchtitan_lc.trainer import Trainer

CPU = torch.device("cpu")


def _trainer(settings: dict[str, Any], rows: dict[str, torch.Tensor]) -> Trainer:
    trainer = Trainer(tiny_config(settings), CPU)
    trainer.loader.close()
    trainer.loader = FixedRows(rows)  # type: ignore[assignment]
    return trainer


def _grads(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Gradients of one step, whole; weights stay as they are."""
    grads: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        for name, parameter in trainer.module.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            grads[name] = parameter.grad.full_tensor().clone()

    handle = trainer.optimizer.register_step_pre_hook(keep)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0
    with trainer.metrics(start=0) as metrics:
        trainer.train_step(metrics)
    handle.remove()
    return grads


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The weights, whole: copies."""
    weights = {}
    for name, parameter in trainer.module.named_parameters():
        assert isinstance(parameter, DTensor)
        weights[name] = parameter.full_tensor().clone()
    return weights


class CountCollectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


# -- one gather and one reduction per unit, however many tiles


def _count(rank: int, world_size: int, tmp: str) -> None:
    register_tiny()
    rows = masked_rows(1, 64)
    counts = {}
    units = 2 + FLAVORS["gqa"].n_layers
    # Units gathered again for backward; by default the head and the last block stay.
    gathered_again = {"default": units - 2, "always": units, "never": 0}
    cases = [(mode, "default") for mode in ("none", "full", "selective")]
    for mode, reshard in [*cases, ("selective", "always"), ("selective", "never")]:
        for tile in (0, 7):
            settings = {
                "job.dump_folder": tmp,
                "parallelism.context_parallel_degree": 2,
                "parallelism.fsdp_reshard_after_forward": reshard,
                "activation_checkpoint.mode": mode,
                "tiling.projection_tokens": tile,
                "tiling.mlp_tokens": tile,
                "tiling.loss_tokens": tile,
            }
            trainer = _trainer(settings, rows)
            with trainer.metrics(start=0) as metrics:
                trainer.train_step(metrics)  # the first step builds FSDP's lazy state
                with CountCollectives() as counted:
                    trainer.train_step(metrics)
            counts[mode, reshard, tile] = dict(counted.counts)
            assert counted.counts["_reduce_scatter_base_"] == units, counted.counts
            gathers = units + gathered_again[reshard]
            assert counted.counts["_allgather_base_"] == gathers, (reshard, counted.counts)
    # 4 stages of one head per rank, each KV head (4, 2 per rank) exchanged once.
    layers, stages, arrivals = FLAVORS["gqa"].n_layers, 4, 2
    forward = layers * (2 * stages + 2 * arrivals)
    backward = layers * (stages * (1 + 1 + 1 + 1) + 2 * arrivals + 2 * arrivals)
    for (mode, *rest), counted in counts.items():
        again = forward if mode == "full" else 0
        assert counted["alltoall_base_"] == forward + again + backward, (mode, rest, counted)
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, counts)
    assert all(other == counts for other in everyone)


def test_collectives_per_step_are_the_same_on_all_ranks_and_do_not_grow_with_tiles(
    tmp_path: Any,
) -> None:
    run_distributed(_count, 2, str(tmp_path), timeout=120)


# -- gradients are summed, not averaged


def _constant_gradients(rank: int, world_size: int) -> None:
    layer = nn.Linear(1, 4, bias=False)
    mesh = ParallelDims(1, world_size, 1, 1).build("cpu").fsdp
    fully_shard(layer, mesh=mesh)
    sum_gradients([layer])
    layer(torch.tensor([[float(rank + 1)]])).sum().backward()
    assert isinstance(layer.weight.grad, DTensor)
    total = world_size * (world_size + 1) / 2
    assert torch.equal(layer.weight.grad.full_tensor(), torch.full((4, 1), total))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_constant_gradients_of_the_ranks_add_up(world_size: int) -> None:
    run_distributed(_constant_gradients, world_size)


# -- masks


def _masked(rank: int, world_size: int, tmp: str) -> None:
    register_tiny()
    settings = {
        "job.dump_folder": tmp,
        "parallelism.context_parallel_degree": 2,
        "training.global_batch_size": 2,
        "optimizer.name": "AdamW",
        "optimizer.weight_decay": 0.5,
    }
    rows = masked_rows(2, 64)
    rows["labels"][:, :32] = IGNORE_INDEX  # rank 0 has no live label in any row
    rows["labels"][0] = IGNORE_INDEX  # and the first micro-batch has none at all
    trainer = _trainer(settings, rows)
    grads = _grads(trainer)
    model = Decoder(FLAVORS["gqa"])
    model.init_weights(seed=0)
    loss, want = reference_step(model, FLAVORS["gqa"], rows)
    with trainer.metrics(start=0) as metrics:  # the weights are still the initial ones
        logged = trainer.log_step(metrics, trainer.train_step(metrics))
    assert logged["loss"] is not None and abs(logged["loss"] - loss) <= 1e-6, (logged, loss)
    for name, grad in want.items():
        assert (grads[name] - grad).norm() <= 1e-5 * grad.norm(), name

    rows["labels"][:] = IGNORE_INDEX
    trainer = _trainer(settings, rows)
    before = _weights(trainer)
    with trainer.metrics(start=0) as metrics:
        result = trainer.train_step(metrics)
        logged = trainer.log_step(metrics, result)
    assert logged["loss"] == 0 and logged["grad_norm"] == 0
    assert not trainer.optimizer.state, "moments must not move on a step without labels"
    for name, weight in _weights(trainer).items():
        assert torch.equal(weight, before[name]), name


def test_empty_shards_and_empty_steps_are_finite_and_train_nothing(tmp_path: Any) -> None:
    run_distributed(_masked, 2, str(tmp_path))


# -- initial weights


def _same_start(rank: int, world_size: int, replicas: int, tmp: str) -> None:
    register_tiny()
    settings = {
        "job.dump_folder": tmp,
        "model.flavor": "six",  # row counts that do not divide
        "parallelism.data_parallel_replicate_degree": replicas,
    }
    torch.manual_seed(rank)  # a rank's own generator must not matter
    trainer = _trainer(settings, masked_rows(world_size, 64))
    direct = Decoder(FLAVORS["six"])
    direct.init_weights(seed=0)
    for name, want in direct.named_parameters():
        got = dict(trainer.module.named_parameters())[name]
        assert isinstance(got, DTensor)
        assert torch.equal(got.full_tensor(), want), name
        locals_: list[Any] = [None] * world_size
        dist.all_gather_object(locals_, got.to_local().detach().clone())
        shards = world_size // replicas
        for r in range(world_size):
            assert torch.equal(locals_[r], locals_[r % shards]), "replicas differ"


@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_initial_weights_are_the_same_on_any_number_of_ranks(
    world_size: int, replicas: int, tmp_path: Any
) -> None:
    run_distributed(_same_start, world_size, replicas, str(tmp_path))


# -- norms


def _norms(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.LayerNorm(3))
    x = torch.randn(4, 5)
    plain(x).square().sum().backward()
    want = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients(plain).values()]))
    for replicate, shard in [(1, world_size), (2, world_size // 2), (world_size, 1)]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.LayerNorm(3))
        mesh = ParallelDims(replicate, shard, 1, 1).build("cpu").fsdp
        for unit in (model[0], model[1]):
            fully_shard(unit, mesh=mesh)  # the norm stays whole on every rank
        sum_gradients(model)
        (model(x).square().sum() / world_size).backward()
        for parameter in model[2].parameters():
            dist.all_reduce(parameter.grad)
        norm = global_grad_norm(model.parameters())
        assert abs(norm - want) <= 1e-5 * want, (replicate, shard, norm, want)
        assert clip_gradients(model.parameters(), 1e9) == norm
        reported = clip_gradients(model.parameters(), 0.5)
        assert reported == norm, "the norm before clipping is reported"
        for name, grad in gradients(model).items():
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            want_grad = gradients(plain)[name] * (0.5 / want)
            assert (whole - want_grad).norm() <= 1e-5 * want_grad.norm(), (replicate, shard, name)


def test_the_gradient_norm_is_that_of_the_unsharded_gradient_on_any_mesh() -> None:
    run_distributed(_norms, 4)


def _scalars(rank: int, world_size: int) -> None:
    mesh = ParallelDims(1, world_size, 1, 1).build("cpu").fsdp
    value = torch.tensor(float(rank + 1))
    total = world_size * (world_size + 1) / 2
    assert sum_over_ranks(value) == total
    assert sum_over_ranks(DTensor.from_local(value, mesh, [Partial()])) == total
    same = torch.tensor(3.0)
    assert sum_over_ranks(DTensor.from_local(same, mesh, [Replicate()])) == sum_over_ranks(same)


def test_a_scalar_is_reduced_alike_whatever_kind_of_tensor_it_is() -> None:
    run_distributed(_scalars, 2)


# -- positions under a bf16 policy


def _angles(rank: int, world_size: int, tmp: str) -> None:
    register_tiny()
    rows = masked_rows(1, 64)
    rows["positions"][:, 1:] += 131_072 - 64  # bf16 would round these to multiples of 1024
    settings = {
        "job.dump_folder": tmp,
        "parallelism.context_parallel_degree": 2,
        "training.mixed_precision_param": "bfloat16",
        "tiling.projection_tokens": 0,
    }
    trainer = _trainer(settings, rows)
    functions: Any = trainer.module.functions
    rotate, rope, seen = functions.rope.rotate, functions.rope, []
    layout, rank = trainer.strategy.layout, dist.get_rank()
    positions = layout.shard({"p": rows["positions"]}, rank)["p"]
    exact_angles = rope.cos_sin(positions, torch.float64)

    def watched(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        rotated = rotate(x, angles)
        assert x.dtype == rotated.dtype == torch.bfloat16
        exact = rotate(x.double(), exact_angles)
        seen.append(((rotated - exact).abs().max() / exact.abs().max()).item())
        return rotated

    rope.rotate = watched
    with trainer.metrics(start=0) as metrics:
        trainer.train_step(metrics)
    assert seen and max(seen) <= 2**-8, max(seen)  # the result's own rounding, no more


def test_angles_keep_full_precision_in_the_blocks_of_a_bf16_run(tmp_path: Any) -> None:
    run_distributed(_angles, 2, str(tmp_path))


# -- after a failure


def _raise_in_a_tile(rank: int, world_size: int, tmp: str) -> None:
    register_tiny()
    rows = masked_rows(1, 64)
    settings = {"job.dump_folder": tmp, "parallelism.context_parallel_degree": 2}
    want = _grads(_trainer(settings, rows))
    trainer = _trainer(settings, rows)
    functions: Any = trainer.module.functions
    loss, calls = functions.loss, 0

    def fails_once(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("the third tile")
        return loss(*args)

    functions.loss = fails_once
    with pytest.raises(RuntimeError, match="the third tile"), trainer.metrics(start=0) as metrics:
        trainer.train_step(metrics)
    got = _grads(trainer)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_step_after_an_exception_inside_the_loss_is_right(tmp_path: Any) -> None:
    run_distributed(_raise_in_a_tile, 2, str(tmp_path))


# -- counters


def _counters(rank: int, world_size: int, tmp: str) -> None:
    register_tiny()
    expected = {1: 1, 2: 2, 4: 4}
    for cp, accumulation in expected.items():
        settings = {
            "job.dump_folder": tmp,
            "parallelism.context_parallel_degree": cp,
            "training.global_batch_size": 4,
        }
        trainer = _trainer(settings, masked_rows(4, 64))
        assert trainer.accumulation == accumulation
        with trainer.metrics(start=0) as metrics:
            result = trainer.train_step(metrics)
        assert trainer.state.n_tokens_seen == 4 * 64
        assert result.n_labels_global == int((masked_rows(4, 64)["labels"] != IGNORE_INDEX).sum())
        lanes: list[Any] = [None] * world_size
        dist.all_gather_object(lanes, trainer.lanes)
        groups = [lanes[r] for r in range(0, world_size, cp)]
        assert all(lanes[r] == groups[r // cp] for r in range(world_size)), "CP peers share rows"
        assert sorted(lane for group in groups for lane in group) == [0, 1, 2, 3]


def test_the_global_batch_and_its_tokens_do_not_depend_on_context_parallelism(
    tmp_path: Any,
) -> None:
    run_distributed(_counters, 4, str(tmp_path))


# -- floating point operations


def _flops(rank: int, world_size: int, tmp: str) -> None:
    register_tiny()
    for flavor, cp in (("gqa", 1), ("gqa", 2), ("tied", 2)):
        settings = {
            "job.dump_folder": tmp,
            "model.flavor": flavor,
            "parallelism.context_parallel_degree": cp,
        }
        trainer = _trainer(settings, masked_rows(2 // cp, 64))
        with trainer.metrics(start=0) as metrics:
            logged = trainer.log_step(metrics, trainer.train_step(metrics))
        args = FLAVORS[flavor]
        # Matrices that multiply: tied or not, there is one output matrix, and the look-up is none.
        tables = 1 if args.tie_embeddings else 2
        multiplied = args.n_params() - (tables - 1) * args.vocab_size * args.dim
        want = 6 * multiplied + 12 * args.n_layers * args.dim * 64
        assert logged["tflops"] and logged["tps"] and logged["time_s"]
        # Of the one row that this rank reads, its share.
        assert abs(logged["tps"] * logged["time_s"] * cp - 64) < 1e-6
        assert abs(logged["tflops"] * 1e12 / logged["tps"] / want - 1) < 1e-9, (flavor, cp)


def test_flops_per_token_leave_out_the_look_up_and_do_not_depend_on_the_ranks_of_a_row(
    tmp_path: Any,
) -> None:
    run_distributed(_flops, 2, str(tmp_path))


# -- compiled tile functions


def _compiled(rank: int, world_size: int, tmp: str) -> None:
    register_tiny()
    rows = masked_rows(2, 64, packed=True)
    settings = {
        "job.dump_folder": tmp,
        "parallelism.context_parallel_degree": 2,
        "training.local_batch_size": 2,
        "training.global_batch_size": 2,
    }
    want = _grads(_trainer(settings, rows))
    compiled = {**settings, "compile.enable": True, "compile.backend": "aot_eager"}
    trainer = _trainer(compiled, rows)
    got = _grads(trainer)
    for name, grad in want.items():
        assert (got[name] - grad).norm() <= 1e-5 * grad.norm(), name
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    assert not counters["graph_break"], dict(counters["graph_break"])
    graphs = counters["stats"]["unique_graphs"]
    _grads(trainer)
    assert counters["stats"]["unique_graphs"] == graphs, "the second step compiled again"


def test_compiled_tiles_give_the_same_gradients_and_compile_once(tmp_path: Any) -> None:
    run_distributed(_compiled, 2, str(tmp_path), timeout=120)


def _many_shapes(rank: int, world_size: int, tmp: str) -> None:
    register_tiny()
    settings = {
        "job.dump_folder": tmp,
        "model.flavor": "mha",
        "attention.heads_per_stage": 3,
        "parallelism.context_parallel_degree": 2,
        "tiling.projection_tokens": 5,
        "compile.enable": True,
        "compile.backend": "eager",
    }
    trainer = _trainer(settings, masked_rows(1, 64))
    _grads(trainer)  # raises where a function would fall back to running uncompiled
    assert torch._dynamo.config.fail_on_recompile_limit_hit


def test_many_shapes_of_tiles_and_stages_all_stay_compiled(tmp_path: Any) -> None:
    run_distributed(_many_shapes, 2, str(tmp_path), timeout=120)
