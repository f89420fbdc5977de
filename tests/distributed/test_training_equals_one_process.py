"""The real Trainer over several ranks against one process: loss, every gradient, one SGD step.

Rows have very different numbers of live labels, batches are accumulated, and gradients are compared, not
loss curves: a mean of means, a missing or doubled division, a label lost at a shard's edge, a wrong
position or a query head that meets another KV head cannot pass.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.helpers import run_distributed
from tests.reference import reference_step
from tests.tiny import FLAVORS, FixedRows, masked_rows, register_tiny, tiny_config
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.trainer import Trainer

ROWS, SEQ = 4, 64
MODES = ("none", "full", "selective")

# fp32: the loss is a mean of numbers near 5.6, gradients differ by the order of summation only.
LOSS_ABS, GRAD_REL = 1e-6, 1e-5


def _full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().cpu().clone()


def one_step(
    settings: dict[str, Any], rows: dict[str, Tensor] | None, device: str
) -> dict[str, Any]:
    """Run one step of the real Trainer; its loss, gradients and new weights, whole, on the CPU.
    rows: None takes those of the trainer's own loader."""
    trainer = Trainer(tiny_config(settings), torch.device(device))
    if rows is not None:
        trainer.loader.close()
        trainer.loader = FixedRows(rows)  # type: ignore[assignment]
    grads: dict[str, Tensor] = {}

    def keep_grads(*_: Any) -> None:
        for name, parameter in trainer.module.named_parameters():
            assert isinstance(parameter, DTensor), f"{name} is not sharded between steps"
            assert parameter.grad is not None, name
            grads[name] = _full(parameter.grad)

    trainer.optimizer.register_step_pre_hook(keep_grads)
    with trainer.metrics(start=0) as metrics:
        result = trainer.train_step(metrics)
        logged = trainer.log_step(metrics, result)
    trainer.loader.close()
    return {
        "loss": logged["loss"],
        "grad_norm": result.grad_norm.item(),
        "grads": grads,
        "weights": {n: _full(p) for n, p in trainer.module.named_parameters()},
        "n_tokens_seen": trainer.state.n_tokens_seen,
    }


def check(settings: dict[str, Any], rows: dict[str, Tensor], device: str = "cpu") -> None:
    """Compare a step under ``settings`` with the reference on the same rows and initial weights."""
    args = FLAVORS[settings.get("model.flavor", "gqa")]
    model = Decoder(args)
    model.init_weights(seed=0)
    loss, grads = reference_step(model, args, rows)
    got = one_step(settings, rows, device)
    label = str(settings)
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads.values()])).item()
    max_norm = settings.get("training.max_norm", 0.0)
    assert max_norm < norm, "clipping must bite to be seen"
    rate = max_norm / norm if max_norm else 1.0  # of SGD at rate 1
    assert abs(got["loss"] - loss) <= LOSS_ABS, (label, got["loss"], loss)
    assert set(got["grads"]) == set(grads)
    for name, grad in grads.items():
        grad = rate * grad
        error = (got["grads"][name] - grad).norm() / grad.norm()
        assert error <= GRAD_REL, (label, name, error.item())
        expected = dict(model.named_parameters())[name].detach() - grad
        # A weight near 1 that moves by little is rounded to fp32's 6e-8 of itself.
        bound = GRAD_REL * grad.norm() + 1e-7 * expected.norm()
        assert (got["weights"][name] - expected).norm() <= bound, (label, name)
    assert abs(got["grad_norm"] - norm) <= 1e-5 * norm, (label, got["grad_norm"], norm)
    assert got["n_tokens_seen"] == ROWS * SEQ


def strategies(cp: int) -> list[dict[str, Any]]:
    if cp == 1:
        return [{"attention.strategy": "local"}]
    upipe = [
        {"attention.strategy": "upipe", "attention.heads_per_stage": heads} for heads in (1, 2, 4)
    ]
    return [{"attention.strategy": "ulysses"}, *upipe]


def _equality_table(rank: int, world_size: int, dp: int, cp: int, tmp: str) -> int:
    register_tiny()
    rows = masked_rows(ROWS, SEQ)
    # The last ones have fewer KV heads than ranks.
    flavors = ["mha", "gqa", *(["gqa2"] if cp == 4 else []), "one_kv"]
    cases = list(itertools.product(strategies(cp), flavors, MODES))
    for strategy, flavor, mode in cases:
        settings = {
            **strategy,
            "model.flavor": flavor,
            "activation_checkpoint.mode": mode,
            "parallelism.context_parallel_degree": cp,
            "training.global_batch_size": ROWS,
            "job.dump_folder": tmp,
        }
        check(settings, rows)
    # Without accumulation: all rows of a data-parallel rank in one micro-batch.
    check({**settings, "training.local_batch_size": ROWS // dp}, rows)
    return len(cases)


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4)])
def test_loss_and_every_gradient_equal_one_process(dp: int, cp: int, tmp_path: Any) -> None:
    counts = run_distributed(_equality_table, dp * cp, dp, cp, str(tmp_path), timeout=240)
    assert min(counts) >= 9


def _odd_cases(rank: int, world_size: int, tmp: str) -> None:
    register_tiny()
    rows = masked_rows(ROWS, SEQ)
    base = {"training.global_batch_size": ROWS, "job.dump_folder": tmp}
    cp = {**base, "parallelism.context_parallel_degree": world_size}
    # Heads that do not divide, an embedding table that is also the output matrix, several rows per
    # micro-batch (an exchange that is right for one row only is right by accident), replicas.
    for flavor in ("six", "seven", "tied"):
        for strategy in strategies(world_size)[:3]:
            check({**cp, **strategy, "model.flavor": flavor, "training.local_batch_size": 2}, rows)
    flavors = ("tied", "gqa") if world_size == 2 else ("tied",)
    for flavor, reshard in itertools.product(flavors, ("always", "never")):
        kept = {"model.flavor": flavor, "parallelism.fsdp_reshard_after_forward": reshard}
        check({**cp, **kept}, rows)
    replicas = {"parallelism.data_parallel_replicate_degree": 2}
    check({**base, **replicas, "model.flavor": "gqa"}, rows)
    # Clipping bites: its norm is that of the whole gradient, whatever the mesh.
    clip = {"training.max_norm": 0.5}
    for spread in (cp, {**base, **replicas}) if world_size == 2 else ():
        check({**spread, **clip}, rows)
    packed = masked_rows(ROWS, SEQ, packed=True)
    for strategy in (*strategies(world_size)[:2], {"attention.strategy": "ring"}):
        for mode in MODES:
            check({**cp, **strategy, "activation_checkpoint.mode": mode}, packed)
    if world_size == 4:
        around_a_ring = {**cp, "parallelism.context_parallel_ulysses_degree": 2}
        for strategy in strategies(world_size)[:2]:
            check({**around_a_ring, **strategy, "training.local_batch_size": 2}, packed)
        check({**base, **clip}, rows)  # one shard per rank
        check({**base, **replicas, **clip}, rows)  # 2 x 2: HSDP
        with_cp = {**replicas, "parallelism.context_parallel_degree": 2}
        check({**base, **with_cp, **clip, "model.flavor": "tied"}, rows)


@pytest.mark.parametrize("world_size", [2, 4])
def test_odd_heads_packed_rows_rings_tied_tables_and_replicas_equal_one_process(
    world_size: int, tmp_path: Any
) -> None:
    run_distributed(_odd_cases, world_size, str(tmp_path), timeout=240)
