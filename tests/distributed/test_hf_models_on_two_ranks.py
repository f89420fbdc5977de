"""Every family of models over two ranks, by every strategy, against transformers on one process.

Biases and norms of heads are cut with the heads or shared by them: 4/2, 6/2 and 14/2 heads, of which the
last stage of two heads leaves a place idle. Logits, the summed loss and the gradient of every weight; then
a step of the real Trainer, where FSDP shards them too.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.distributed.test_training_equals_one_process import one_step
from tests.helpers import run_distributed
from tests.hf_models import FAMILIES, read_args, renamed_weights, transformers_model, write_config
from tests.tiny import masked_rows
from torchtitan_lc.attention.base import ALONE, Peers
from torchtitan_lc.attention.kernels import CpuFlash
from torchtitan_lc.attention.strategies import make_strategy
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.models.decoder.parallelize import parallelize
from torchtitan_lc.models.spec import ModelSpec, register_model

ROWS, SEQ = 2, 48


def rows() -> dict[str, Tensor]:
    batch = masked_rows(ROWS, SEQ)
    live = batch["labels"] >= 0
    batch["labels"] = torch.where(live, batch["labels"] % 97, batch["labels"])
    return {**batch, "tokens": batch["tokens"] % 97}


def expected(family: str, folder: Path) -> dict[str, Any]:
    """What transformers computes, under our names."""
    theirs = transformers_model(family)
    write_config(theirs, folder)
    args = read_args(family, folder)
    batch = rows()
    logits = theirs(input_ids=batch["tokens"]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    weights = renamed_weights(family, theirs, args)
    loss.backward()
    for parameter in theirs.parameters():
        parameter.data = parameter.grad
    return {
        "args": args,
        "weights": weights,
        "logits": logits.detach(),
        "loss": loss.item(),
        "grads": renamed_weights(family, theirs, args),
    }


def _close(got: Tensor, want: Tensor, label: Any) -> None:
    assert (got - want).norm() <= 1e-4 * want.norm(), (label, (got - want).norm() / want.norm())


def _strategies(rank: int, world_size: int, pickled: bytes) -> None:
    cases = pickle.loads(pickled)
    everyone = Peers(world_size, rank, dist.group.WORLD)
    plans: list[tuple[str, Peers, Peers, int]] = [
        ("ulysses", everyone, ALONE, 1),
        ("upipe", everyone, ALONE, 1),
        ("upipe", everyone, ALONE, 2),
        ("ring", ALONE, everyone, 1),
    ]
    for family, want in cases.items():
        for name, ulysses, ring, heads_per_stage in plans:
            label = (family, name, heads_per_stage)
            model = Decoder(want["args"])
            model.load_state_dict(want["weights"])
            strategy = model.execution.strategy = make_strategy(
                name,
                CpuFlash(),
                ulysses=ulysses,
                ring=ring,
                heads_per_stage=heads_per_stage,
                tile_tokens=7,
            )
            mine = strategy.layout.shard(rows(), rank)
            logits = model(mine["tokens"], mine["positions"]).detach()
            parts = [torch.empty_like(logits) for _ in range(world_size)]
            dist.all_gather(parts, logits.contiguous())
            whole = strategy.layout.unshard(parts)
            assert (whole - want["logits"]).abs().max() <= 1e-5, label

            loss = model(mine["tokens"], mine["positions"], mine["labels"])
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            assert total.item() == pytest.approx(want["loss"], rel=1e-6), label
            for parameter_name, parameter in model.named_parameters():
                assert parameter.grad is not None, (label, parameter_name)
                dist.all_reduce(parameter.grad)
                _close(parameter.grad, want["grads"][parameter_name], (*label, parameter_name))


def _trainer(rank: int, world_size: int, pickled: bytes, tmp: str) -> None:
    cases = pickle.loads(pickled)
    args: dict[str, DecoderArgs] = {family: case["args"] for family, case in cases.items()}
    register_model(ModelSpec("families", args, Decoder, parallelize))
    for family in args:
        settings = {
            "model.name": "families",
            "model.flavor": family,
            "parallelism.context_parallel_degree": world_size,
            "training.global_batch_size": ROWS,
            "training.seq_len": SEQ,
            "job.dump_folder": tmp,
        }
        got = one_step(settings, rows(), "cpu")
        model = Decoder(args[family])
        model.init_weights(seed=0)
        batch = rows()
        live = int((batch["labels"] >= 0).sum())
        loss = model(batch["tokens"], batch["positions"], batch["labels"]) / live
        loss.backward()
        assert got["loss"] == pytest.approx(loss.item(), abs=1e-6), family
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            _close(got["grads"][name], parameter.grad, (family, name))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Pickled here: as arguments of a process, so many tensors would be as many file descriptors."""
    pytest.importorskip("transformers")
    found = {family: expected(family, tmp_path_factory.mktemp("hf")) for family in FAMILIES}
    return pickle.dumps(found)


def test_logits_loss_and_gradients_by_every_strategy_are_those_of_transformers(
    cases: bytes,
) -> None:
    run_distributed(_strategies, 2, cases, timeout=120)


def test_a_sharded_step_of_every_family_equals_one_process(cases: bytes, tmp_path: Path) -> None:
    run_distributed(_trainer, 2, cases, str(tmp_path), timeout=120)
