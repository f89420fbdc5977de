"""The equality table: every strategy, on any heads, documents, mask and number of ranks, against one rank.

    strategies  ulysses, upipe with 1 and 2 heads per stage, ring, USP and upipe around a ring
    heads       8/8, 8/2, 6/2, 7/1, 9/3, 14/2 (query / KV): dividing the ranks or not, fewer KV heads
                than ranks, groups that a rank or a stage cuts
    rows        one document; packed, each row differently, with one-token documents and a boundary at
                a shard's edge; padded, of a length that no number of ranks divides
    mask        causal or not

Output, gradient of the input and of every weight, in fp32 within 1e-5 relative of dense attention in
fp64 on the whole rows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers import run_distributed
from torchtitan_lc.attention.base import ALONE, Peers, Projection, Projections, Weight
from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.attention.kernels import CpuFlash, Math
from torchtitan_lc.attention.layout import Layout
from torchtitan_lc.attention.local import Local
from torchtitan_lc.attention.strategies import make_strategy
from torchtitan_lc.models.decoder.args import DecoderArgs
from torchtitan_lc.models.decoder.functions import Functions
from torchtitan_lc.ops.rope import Rope

WIDTH, HEAD_DIM = 24, 8
ROPE = Rope(HEAD_DIM, 500_000.0)
HEADS = [(8, 8), (8, 2), (6, 2), (7, 1), (9, 3), (14, 2)]
ROWS = ("one document", "packed", "padded")
TOLERANCE = 1e-5
SCHEDULES: dict[str, set[str]] = {
    "lean": set(),
    "overlapped": {"overlap_exchange"},
    "fast": {"hold_normed_input", "sum_kv_gradients", "overlap_exchange"},
}


@dataclass(frozen=True)
class Case:
    """Whole rows: x, dy [B, S, M] fp64; weights by name, fp64; positions [B, S]; documents of the rows."""

    x: Tensor
    dy: Tensor
    positions: Tensor
    weights: dict[str, Tensor]
    n_heads: int
    n_kv_heads: int
    causal: bool

    def projections(self, weights: dict[str, Tensor]) -> Projections:
        args = DecoderArgs(
            self.n_heads * HEAD_DIM,
            1,
            self.n_heads,
            self.n_kv_heads,
            8,
            8,
            qkv_bias="bq" in weights,
            qk_norm="nq" in weights,
        )
        f = Functions(args)

        def of(*names: str) -> tuple[Weight, ...]:
            axes = {"w": 0, "b": 0, "n": None}
            return tuple(Weight(weights[n], axes[n[0]]) for n in names if n in weights)

        return Projections(
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=HEAD_DIM,
            norm=Projection(f.norm, of("norm")),
            query=Projection(
                f.query, of("wq", "bq", "nq"), products=f.products("query"), after=f.after_query
            ),
            key_value=Projection(
                f.key_value,
                of("wk", "bk", "nk", "wv", "bv"),
                products=f.products("key_value"),
                after=f.after_key_value,
            ),
            output=Projection(f.output, (Weight(weights["wo"], 1),), f.gradients.output),
            scale=HEAD_DIM**-0.5,
            causal=self.causal,
        )


def make_case(
    heads: tuple[int, int], rows: str, causal: bool, biased: bool = False, normed: bool = False
) -> Case:
    generator = torch.Generator().manual_seed(heads[0] * 10 + heads[1])

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    seq_len = 41 if rows == "padded" else 48
    batch = 2 if rows == "packed" else 1
    n, m = heads
    weights = {
        "norm": 1 + 0.1 * randn(WIDTH),
        "wq": randn(n * HEAD_DIM, WIDTH) * 0.3,
        "wk": randn(m * HEAD_DIM, WIDTH) * 0.3,
        "wv": randn(m * HEAD_DIM, WIDTH) * 0.3,
        "wo": randn(WIDTH, n * HEAD_DIM) * 0.3,
    }
    if biased:
        weights |= {f"b{name}": randn(len(weights[f"w{name}"])) for name in "qkv"}
    if normed:
        weights |= {name: 1 + 0.1 * randn(HEAD_DIM) for name in ("nq", "nk")}
    starts = [[0, 1, 2, 12, 24, 25, 40], [0, 17]] if rows == "packed" else [[0]] * batch
    positions = torch.stack([_positions(s, seq_len) for s in starts])
    x, dy = randn(batch, seq_len, WIDTH), randn(batch, seq_len, WIDTH)
    return Case(x, dy, positions, weights, n, m, causal)


def _positions(starts: list[int], length: int) -> Tensor:
    return torch.cat([torch.arange(b - a) for a, b in itertools.pairwise([*starts, length])])


def run(strategy: Any, case: Case, x: Tensor, positions: Tensor, documents: Any, dy: Tensor) -> Any:
    """Output, gradient of x, gradients of the weights."""
    leaves = {name: w.to(x.dtype).requires_grad_() for name, w in case.weights.items()}
    x = x.clone().requires_grad_()
    places = ROPE.cos_sin(positions, x.dtype)
    y = strategy.attend(x, places, case.projections(leaves), documents)
    return y.detach(), *torch.autograd.grad(y, [x, *leaves.values()], dy)


def check(
    name: str, ulysses: Peers, ring: Peers, heads_per_stage: int, case: Case, schedule: str
) -> None:
    label = (
        f"{name} U{ulysses.ranks} R{ring.ranks} n{heads_per_stage} {case.n_heads}/{case.n_kv_heads} "
        f"{schedule}"
    )
    documents = Documents.from_positions(case.positions)
    want = run(Local(Math()), case, case.x, case.positions, documents, case.dy)

    strategy = make_strategy(
        name,
        CpuFlash(),
        ulysses=ulysses,
        ring=ring,
        heads_per_stage=heads_per_stage,
        tile_tokens=7,
        **{
            key: key in SCHEDULES[schedule]
            for key in ("hold_normed_input", "sum_kv_gradients", "overlap_exchange")
        },
    )
    layout = strategy.layout
    rank = ring.rank * ulysses.ranks + ulysses.rank
    seq_len = case.x.shape[1]
    padding = -seq_len % layout.multiple
    x, dy = (_pad(t, padding).float() for t in (case.x, case.dy))
    positions = torch.cat((case.positions, torch.arange(padding).expand(len(x), -1)), dim=1)
    documents = Documents.from_positions(positions)
    got = run(
        strategy,
        case,
        _cut(layout, x, rank),
        layout.shard({"positions": positions}, rank)["positions"],
        documents,
        _cut(layout, dy, rank),
    )
    y, dx, *dweights = got
    for what, mine, whole in (("y", y, want[0]), ("dx", dx, want[1])):
        parts = [torch.empty_like(mine) for _ in range(layout.ranks)]
        dist.all_gather(parts, mine.contiguous())
        _close(layout.unshard(parts)[:, :seq_len], whole, label, what)
    for what, mine, whole in zip(case.weights, dweights, want[2:], strict=True):
        dist.all_reduce(mine)
        _close(mine, whole, label, what)


def _pad(x: Tensor, padding: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, padding))


def _cut(layout: Layout, x: Tensor, rank: int) -> Tensor:
    return torch.cat([x[:, a:b] for a, b in layout.ranges(rank, x.shape[1])], dim=1)


def _close(got: Tensor, want: Tensor, label: str, what: str) -> None:
    error = (got - want).norm() / want.norm()
    assert error <= TOLERANCE, f"{label}: {what} is off by {error:.2e}"


def _table(rank: int, world_size: int) -> int:
    world = dist.group.WORLD
    done = 0
    everyone = Peers(world_size, rank, world)
    plans: list[tuple[str, Peers, Peers, int]] = [
        ("ulysses", everyone, ALONE, 1),
        ("upipe", everyone, ALONE, 1),
        ("upipe", everyone, ALONE, 2),
        ("ring", ALONE, everyone, 1),
    ]
    if world_size == 4:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        rings = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        ulysses = Peers(2, rank % 2, pairs[rank // 2])
        ring = Peers(2, rank // 2, rings[rank % 2])
        plans += [("ulysses", ulysses, ring, 1)]
        plans += [("upipe", ulysses, ring, heads) for heads in (1, 2, 3)]
    for heads, rows, causal in itertools.product(HEADS, ROWS, (True, False)):
        case = make_case(heads, rows, causal)
        for plan in plans:
            check(*plan, case, list(SCHEDULES)[done % len(SCHEDULES)])
            done += 1
    return done


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_output_and_every_gradient_equal_one_rank(world_size: int) -> None:
    counts = run_distributed(_table, world_size, timeout=280)
    assert min(counts) == len(HEADS) * len(ROWS) * 2 * (8 if world_size == 4 else 4)


def _biases_and_norms(rank: int, world_size: int) -> None:
    """A KV head for all ranks, its gradients summed over its copies, and what comes after products."""
    everyone = Peers(world_size, rank, dist.group.WORLD)
    plans = [
        ("ulysses", everyone, ALONE, 1),
        ("upipe", everyone, ALONE, 1),
        ("ring", ALONE, everyone, 1),
    ]
    for biased, normed in ((True, False), (False, True), (True, True)):
        case = make_case((7, 1), "packed", True, biased, normed)
        for plan, schedule in itertools.product(plans, ("lean", "fast")):
            check(*plan, case, schedule)


@pytest.mark.parametrize("world_size", [2, 3])
def test_biases_and_norms_of_heads_have_their_gradients(world_size: int) -> None:
    run_distributed(_biases_and_norms, world_size)


def _odd_groups(rank: int, world_size: int) -> None:
    """7 KV heads of 2 query heads each on 2 ranks: the cut goes through a group, nothing is padded."""
    everyone = Peers(world_size, rank, dist.group.WORLD)
    case = make_case((14, 7), "packed", True)
    for plan in [("ulysses", everyone, ALONE, 1), ("upipe", everyone, ALONE, 2)]:
        for schedule in SCHEDULES:
            check(*plan, case, schedule)


def test_a_group_that_the_ranks_cut_keeps_its_kv_head() -> None:
    run_distributed(_odd_groups, 2)


def _isolated(rank: int, world_size: int) -> None:
    everyone = Peers(world_size, rank, dist.group.WORLD)
    plans = [("ulysses", everyone, ALONE), ("upipe", everyone, ALONE), ("ring", ALONE, everyone)]
    case = make_case((8, 2), "packed", True)
    documents = Documents.from_positions(case.positions)
    for name, ulysses, ring in plans:
        strategy = make_strategy(name, CpuFlash(), ulysses=ulysses, ring=ring)

        def output(x: Tensor, strategy: Any = strategy) -> Tensor:
            layout = strategy.layout
            mine = _cut(layout, x.float(), rank)
            positions = layout.shard({"p": case.positions}, rank)["p"]
            weights = {name: w.float() for name, w in case.weights.items()}
            places = ROPE.cos_sin(positions)
            y = strategy.attend(mine, places, case.projections(weights), documents)
            parts = [torch.empty_like(y) for _ in range(world_size)]
            dist.all_gather(parts, y)
            return layout.unshard(parts)

        before = output(case.x)
        changed = case.x.clone()
        changed[0, 5] += 1.0  # a token of the document [2, 12) of row 0
        after = output(changed)
        same = (before == after).all(dim=-1)
        assert same[1].all() and same[0, :5].all() and same[0, 12:].all(), name
        assert not same[0, 5:12].any(), name


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_changed_token_changes_no_bit_of_another_document(world_size: int) -> None:
    run_distributed(_isolated, world_size)
