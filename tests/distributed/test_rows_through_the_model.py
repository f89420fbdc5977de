"""Rows on their way through loader, layout, model and back: which rank gets which token, and that what
comes out, put back into row order, is what one process computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.distributed.test_training_equals_one_process import LOSS_ABS, one_step
from tests.helpers import run_distributed
from tests.reference import reference_step
from tests.tiny import FLAVORS, masked_rows, register_tiny, tiny_config
from torchtitan_lc.attention.base import ALONE, Peers
from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.attention.kernels import CpuFlash
from torchtitan_lc.attention.layout import Layout
from torchtitan_lc.attention.staged import StagedStrategy
from torchtitan_lc.attention.strategies import make_strategy
from torchtitan_lc.components.data import build_loader
from torchtitan_lc.components.tokenizer import ByteTokenizer
from torchtitan_lc.models.decoder.model import Decoder
from torchtitan_lc.ops.loss import IGNORE_INDEX
from torchtitan_lc.trainer import Trainer

SEQ = 64
CP = "parallelism.context_parallel_degree"
RING_OF_2 = {"parallelism.context_parallel_ulysses_degree": 2}


# -- from the loader to the ranks


def _trained_on(rank: int, world_size: int, tmp: str) -> None:
    register_tiny()
    for settings in ({}, {"attention.strategy": "ring"}, RING_OF_2):
        chosen = {**settings, CP: world_size, "job.dump_folder": tmp, "attention.kernel": "cpu"}
        trainer = Trainer(tiny_config(chosen), torch.device("cpu"))
        whole: dict[str, Tensor] = {}
        next_batch = trainer.loader.next_batch

        def watched(lanes: Any, whole: Any = whole, next_batch: Any = next_batch) -> Any:
            whole.update(next_batch(lanes))
            return whole

        trainer.loader.next_batch = watched  # type: ignore[method-assign]
        with trainer.metrics(start=0) as metrics:
            batch = trainer._next_batch(0, metrics)
        trainer.loader.close()
        mine = {"tokens": batch.tokens, "positions": batch.positions, "labels": batch.labels}
        for name, part in mine.items():
            assert torch.equal(_whole(trainer.strategy.layout, part), whole[name]), name
        tokens, labels = whole["tokens"], _whole(trainer.strategy.layout, mine["labels"])
        assert torch.equal(labels[:, :-1], tokens[:, 1:])
        assert int((labels != IGNORE_INDEX).sum()) == SEQ, "a label is lost at a shard's edge"
        if not settings:
            assert int(batch.positions[0, 0]) == rank * SEQ // world_size


def test_all_ranks_together_train_on_each_label_of_the_row_once(tmp_path: Any) -> None:
    run_distributed(_trained_on, 4, str(tmp_path))


# -- rows that have to be padded


def _padded(rank: int, world_size: int, seq_len: int, tmp: str) -> None:
    register_tiny()
    args = FLAVORS["gqa"]
    rows_per_step = 2
    for strategy in ("upipe", "ring"):
        settings = {
            "attention.strategy": strategy,
            CP: world_size,
            "training.seq_len": seq_len,
            "training.global_batch_size": rows_per_step,
            "job.dump_folder": tmp,
        }
        training, lanes = tiny_config(settings).training, range(rows_per_step)
        loader = build_loader(training, ByteTokenizer(), lanes, rows_per_step)
        rows = loader.next_batch(lanes)
        loader.close()
        assert rows["labels"].shape == (rows_per_step, seq_len)
        model = Decoder(args)
        model.init_weights(seed=0)
        loss, grads = reference_step(model, args, rows)
        got = one_step(settings, None, "cpu")
        assert abs(got["loss"] - loss) <= LOSS_ABS, (strategy, got["loss"], loss)
        for name, grad in grads.items():
            assert (got["grads"][name] - grad).norm() <= 1e-5 * grad.norm(), (strategy, name)
        assert got["n_tokens_seen"] == rows_per_step * seq_len, "padding is no token"


@pytest.mark.parametrize(("world_size", "seq_len"), [(2, 63), (3, 64)])
def test_a_row_that_does_not_divide_trains_as_in_one_process(
    world_size: int, seq_len: int, tmp_path: Any
) -> None:
    run_distributed(_padded, world_size, seq_len, str(tmp_path))


# -- through the model and back


def _whole(layout: Layout, part: Tensor) -> Tensor:
    """Parts of all ranks in row order."""
    parts = [torch.empty_like(part) for _ in range(layout.ranks)]
    dist.all_gather(parts, part.contiguous())
    return layout.unshard(parts)


def _strategies(rank: int, world_size: int) -> list[StagedStrategy]:
    kernel, everyone = CpuFlash(), Peers(world_size, rank, dist.group.WORLD)
    if world_size == 1:
        return [make_strategy("local", kernel)]
    plans = [("ulysses", everyone, ALONE), ("upipe", everyone, ALONE), ("ring", ALONE, everyone)]
    if world_size == 4:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        rings = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        ulysses = Peers(2, rank % 2, pairs[rank // 2])
        ring = Peers(2, rank // 2, rings[rank % 2])
        plans += [("ulysses", ulysses, ring), ("upipe", ulysses, ring)]
    return [make_strategy(name, kernel, ulysses=u, ring=r) for name, u, r in plans]


def _run(
    model: Decoder, tokens: Tensor, positions: Tensor, rank: int, layout: Layout
) -> dict[str, Tensor]:
    """The output of every block and the logits, whole rows in row order; collective if spread."""
    found: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor) -> None:
        found[name] = _whole(layout, x) if layout.ranks > 1 else x

    blocks = model.layers.items()
    hooks = [b.register_forward_hook(lambda _m, _i, y, n=n: keep(n, y)) for n, b in blocks]
    part = layout.shard({"tokens": tokens, "positions": positions}, rank)
    with torch.no_grad():
        documents = Documents.from_positions(positions)
        keep("logits", model(part["tokens"], part["positions"], documents=documents))
    for hook in hooks:
        hook.remove()
    return found


def _model(flavor: str = "gqa") -> Decoder:
    model = Decoder(FLAVORS[flavor])
    model.init_weights(seed=0)
    return model


def _row_order(rank: int, world_size: int) -> None:
    rows = masked_rows(2, SEQ, packed=True)
    inputs = rows["tokens"], rows["positions"]
    want = _run(_model().double(), *inputs, 0, Layout())
    labels = rows["labels"].flatten()
    want_losses = F.cross_entropy(want["logits"].flatten(0, 1), labels, reduction="none")
    assert set(want) == {"0", "1", "logits"}
    for strategy in _strategies(rank, world_size):
        model = _model()
        model.execution.strategy = strategy
        got = _run(model, *inputs, rank, strategy.layout)
        for name, x in want.items():
            error = (got[name] - x).abs().max().item()
            assert error <= 1e-5 * x.abs().max().item(), (strategy.name, name, error)
        losses = F.cross_entropy(got["logits"].flatten(0, 1), labels, reduction="none")
        assert (losses - want_losses).abs().max() <= 1e-5, strategy.name


def test_layers_logits_and_losses_of_tokens_are_in_row_order_those_of_one_process() -> None:
    run_distributed(_row_order, 4)


def _isolated(rank: int, world_size: int) -> None:
    rows = masked_rows(2, SEQ, packed=True)  # row 0: documents begin at 0, 1, 2, 16, 32 and 61
    tokens, positions = rows["tokens"], rows["positions"]
    for strategy in _strategies(rank, world_size):
        model = _model()
        model.execution.strategy = strategy
        before = _run(model, tokens, positions, rank, strategy.layout)["logits"]
        for changed, stop in ((5, 16), (20, 32), (62, SEQ)):  # the last document is as padding is
            other = tokens.clone()
            other[0, changed] = (other[0, changed] + 1) % 256
            after = _run(model, other, positions, rank, strategy.layout)["logits"]
            same = (before == after).all(dim=-1)
            assert same[1].all(), strategy.name
            assert same[0, :changed].all() and same[0, stop:].all(), (strategy.name, changed)
            assert not same[0, changed:stop].any(), (strategy.name, changed)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_changed_token_changes_no_bit_of_the_logits_of_another_document(world_size: int) -> None:
    run_distributed(_isolated, world_size)
