"""Stand-ins for compiled functions: their buffers against counts by hand and torch's own partitioner."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lc.models.decoder.functions import RECOMPUTED, Functions
from torchtitan_lc.models.llama3 import FLAVORS
from torchtitan_lc.ops.linear import gradients_of
from torchtitan_lc.ops.rope import Rope
from torchtitan_lc.ops.tiled import leaf, vjp
from torchtitan_lc.plan.fused import fused
from torchtitan_lc.plan.kernels import Operation, scheduled
from torchtitan_lc.tools.meter import Meter

TOKENS, WIDTH, INNER = 512, 64, 256
HIDDEN, WIDE, WEIGHT = (2 * n for n in (TOKENS * WIDTH, TOKENS * INNER, WIDTH * INNER))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate) * (x @ up).sigmoid().square()) @ down


GATED = ((TOKENS, WIDTH), (WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH))


def forward_peak(fn: Callable[..., Any], *inputs: Tensor) -> int:
    with Meter() as meter:
        fused(fn)(*inputs)
    return meter.peak


def test_of_a_forward_two_products_and_one_result_exist() -> None:
    # The gated product is written over one of the two it is made from; then it and the last are there.
    assert forward_peak(gated, *(meta(*shape) for shape in GATED)) == 2 * WIDE


def test_backward_holds_what_forward_saved_and_frees_it_on_its_way() -> None:
    inputs = [leaf(meta(*shape)) for shape in GATED]
    dy = meta(TOKENS, WIDTH)
    with Meter() as meter:
        y = fused(gated)(*inputs)
        assert meter.peak == meter.now == 3 * WIDE + HIDDEN  # both products, the gated one, y
        meter.restart()
        grads = torch.autograd.grad(y, inputs, dy)
        # The gated one has gone, its gradient is there. Each product's own is made from all three, so that
        # neither of the two is written over one of them.
        assert meter.peak == 5 * WIDE + WEIGHT + HIDDEN
        del y
    assert [g.shape for g in grads] == [x.shape for x in inputs]
    assert meter.now == sum(g.numel() * 2 for g in grads)


def test_a_result_takes_over_what_it_alone_is_made_from() -> None:
    x, w = meta(TOKENS, WIDTH), meta(WIDTH, INNER)
    assert forward_peak(lambda x, w: (x @ w).float().exp().bfloat16(), x, w) == WIDE
    assert forward_peak(lambda x, w: (x @ w).float().exp(), x, w) == 3 * WIDE  # of another size
    assert forward_peak(lambda x, w: (x @ w).half(), x, w) == 2 * WIDE  # of another dtype
    assert forward_peak(lambda x, w: torch.cat([x @ w] * 2), x, w) == 3 * WIDE  # of another length

    def two(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y.exp(), y.sin()

    assert forward_peak(two, x, w) == 3 * WIDE


def test_nothing_is_written_over_what_is_read_in_another_order() -> None:
    x, w, places = meta(1, TOKENS, WIDTH), meta(WIDTH, INNER), meta(1, TOKENS, INNER)

    def rotated(x: Tensor, w: Tensor, cos_sin: Tensor) -> Tensor:
        return Rope(INNER, 1e4).rotate((x @ w).unflatten(-1, (1, INNER)), cos_sin)

    assert forward_peak(rotated, x, w, places) == 2 * WIDE


def test_kernels_follow_those_that_make_what_they_read() -> None:
    operations = [
        Operation(frozenset({0}), (1,), product=True),
        Operation(frozenset({1}), (2,)),  # joined with the one of 4, which needs the product 3
        Operation(frozenset({0}), (3,), product=True),
        Operation(frozenset({1, 3}), (4,)),
        Operation(frozenset({2, 4}), (5,), product=True),
    ]
    kernels = scheduled(operations, {5}, (), [meta(4)] * 6)
    assert [set(kernel.writes) for kernel in kernels] == [{1}, {3}, {2, 4}, {5}]
    assert [set(kernel.frees) for kernel in kernels] == [set(), {0}, {1, 3}, {2, 4}]


def test_a_reduction_is_kept_in_place_of_what_it_reduces() -> None:
    def fn(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        y = x @ up
        return (y.sigmoid() @ down) * y.float().mean(dim=-1, keepdim=True).bfloat16()

    x, up, down = meta(TOKENS, WIDTH), meta(WIDTH, INNER), meta(INNER, WIDTH)
    # Not y beside its sigmoid and the second product.
    assert forward_peak(fn, x, up, down) == 2 * WIDE + 4 * TOKENS


def test_inputs_are_never_written_over() -> None:
    assert forward_peak(torch.exp, meta(TOKENS, WIDTH)) == HIDDEN


def test_wide_intermediates_of_a_loss_are_neither_made_nor_saved() -> None:
    x, w = leaf(meta(TOKENS, WIDTH)), leaf(meta(WIDTH, INNER))
    labels = meta(TOKENS, dtype=torch.int64)

    def loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy((x @ w).float(), labels, reduction="sum")

    with Meter() as meter:
        y = fused(loss)(x, w, labels)
        assert meter.peak == WIDE + 4  # logits in bf16, and the loss
        dx, dw = torch.autograd.grad(y, [x, w])
    assert meter.peak <= WIDE + HIDDEN + WEIGHT + 8  # their gradient lies where they did
    assert dx.shape == x.shape and dw.shape == w.shape


def test_what_the_output_does_not_need_is_left_to_backward() -> None:
    class Gradients(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x.new_zeros(()).expand(TOKENS, WIDTH)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return dy @ w.t(), x.t() @ dy

    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return Gradients.apply((x @ w).exp(), v)

    inputs = [leaf(meta(*s)) for s in ((TOKENS, WIDTH), (WIDTH, INNER), (INNER, WIDTH))]
    with Meter() as meter:
        y = fused(fn)(*inputs)
        assert meter.peak == 2  # a number
        meter.restart()
        torch.autograd.grad(y, inputs, meta(TOKENS, WIDTH))
    assert meter.peak >= 2 * WIDE


@pytest.mark.parametrize(
    "name",
    ["norm", "query", "key_value", "after_query", "after_key_value", "output", "mlp_half", "loss"],
)
def test_the_decoders_functions_give_the_shapes_that_they_gave(name: str) -> None:
    fn, inputs = case(name, "meta")
    outputs = fn(*inputs)
    several = isinstance(outputs, tuple)
    grads = [torch.empty_like(y) for y in (outputs if several else (outputs,))]
    for a, b in zip(
        (outputs if several else (outputs,)),
        (fused(fn)(*inputs) if several else (fused(fn)(*inputs),)),
        strict=True,
    ):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    for a, b in zip(vjp(fn, inputs, grads), vjp(fused(fn), inputs, grads), strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or (a.shape, a.dtype) == (b.shape, b.dtype)


LLAMA: list[tuple[str, dict[str, Any]]] = [
    (name, {}) for name in ("norm", "query", "key_value", "output", "mlp_half", "loss")
]
QWEN2, QWEN3 = {"qkv_bias": True}, {"qk_norm": True}
HEADS = ("query", "key_value", "after_query", "after_key_value")
QWEN = [(name, variant) for name in HEADS for variant in (QWEN2, QWEN3)]
AFTER: list[tuple[str, dict[str, Any]]] = [("after_query", {}), ("after_key_value", {})]
CASES = [(*each, False) for each in LLAMA + AFTER + QWEN]
CASES += [(name, {}, True) for name in RECOMPUTED]


@pytest.mark.parametrize(("name", "variant", "recomputed"), CASES)
def test_forward_saves_what_torchs_partitioner_saves(
    name: str, variant: dict[str, Any], recomputed: bool
) -> None:
    """But for statistics of a row or head, a few bytes a token, which may be made again instead."""
    fn, inputs = case(name, "cpu", recomputed, variant)
    real = saved_by_torch(fn, inputs)
    fn, inputs = case(name, "meta", recomputed, variant)
    with Meter() as meter:
        y = fused(fn)(*inputs)
        outputs = {x.untyped_storage() for x in (y if isinstance(y, tuple) else (y,))}
        given = {x.untyped_storage()._cdata for x in inputs}  # v is a view of its product
        ours = meter.now - sum(x.nbytes() for x in outputs if x._cdata not in given)
    assert abs(ours - real) <= 5 * 4 * TOKENS + 8, f"{ours} bytes, torch {real}"


def test_the_gated_mlps_backward_holds_four_of_its_width() -> None:
    """Both products of forward and their gradients: not also what is multiplied by w2, and its own."""
    fn, inputs = case("mlp_half", "meta", recomputed=True)
    with Meter() as meter:
        vjp(fused(fn), inputs, [meta(1, TOKENS, WIDTH)])
    assert 4 * WIDE < meter.peak < 5 * WIDE


def case(
    name: str, device: str, recomputed: bool = False, variant: dict[str, Any] | None = None
) -> tuple[Any, list[Tensor]]:
    """A function of a decoder, and inputs of a tile."""
    args = dataclasses.replace(FLAVORS["8B"], **(variant or {}))
    functions = Functions(args)
    if recomputed:
        functions = functions.gradients
    make = partial(torch.zeros, dtype=torch.bfloat16, device=device)
    d, heads = args.head_dim, 2
    h, scale = make(1, TOKENS, WIDTH), make(WIDTH)
    places = torch.zeros(1, TOKENS, d, device=device)

    def to_heads() -> list[Tensor]:
        return [make(heads * d, WIDTH), *([make(heads * d)] if args.qkv_bias else [])]

    normed = [make(d)] if args.qk_norm else []
    product = make(1, TOKENS, heads * d)
    labels = torch.zeros(1, TOKENS, dtype=torch.int64, device=device)
    inputs = {
        "norm": [h, scale],
        "query": [h, places, *to_heads(), *normed],
        "key_value": [h, places, *to_heads(), *normed, *to_heads()],
        "after_query": [product, places, *to_heads(), *normed],
        "after_key_value": [product, product, places, *to_heads(), *normed, *to_heads()],
        "output": [make(1, TOKENS, heads, d), make(WIDTH, heads * d)],
        "mlp_half": [h, scale, make(INNER, WIDTH), make(WIDTH, INNER), make(INNER, WIDTH)],
        "loss": [h, labels, scale, make(INNER, WIDTH)],
    }[name]
    fn = getattr(functions, name)
    return fn, [leaf(x) if x.dtype == torch.bfloat16 else x for x in inputs]


def saved_by_torch(fn: Callable[..., Any], inputs: list[Tensor]) -> int:
    """Bytes of intermediates that the forward graph hands to backward, beside its outputs and inputs."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    found: dict[str, int] = {}

    def forward(graph: Any, _: Any) -> Any:
        returned = graph.graph.find_nodes(op="output")[0].args[0]
        count = 2 if fn.__name__.endswith("key_value") else 1
        bases = {base(node): node for node in returned[count:] if node is not None}
        bases = {n: node for n, node in bases.items() if n.op != "placeholder"}
        for node in returned[:count]:
            bases.pop(base(node), None)
        found["bytes"] = sum(n.meta["val"].untyped_storage().nbytes() for n in bases)
        return graph.forward

    def base(node: Any) -> Any:
        while node.op == "call_function" and getattr(node.target, "is_view", False):
            node = node.args[0]
        return node

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: graph.forward,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch.compile(fn, backend=backend, dynamic=False)(*inputs)
    torch.compiler.reset()
    return found["bytes"]


def test_a_plan_of_a_compiled_job_loads_no_compiler() -> None:
    code = (
        "import sys; from tests.unit.plan.jobs import plan; "
        "plan({'training.seq_len': 2**17, 'compile.enable': True}); "
        "print([m for m in ('torch._dynamo', 'torch._inductor', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_what_is_written_in_part_lies_in_a_whole_buffer() -> None:
    """Rope on some of a head's dimensions, say."""

    def partly(x: Tensor, gate: Tensor) -> Tensor:
        y = x @ gate
        y[..., : INNER // 4] = y[..., : INNER // 4].sin()
        return y

    assert forward_peak(partly, meta(TOKENS, WIDTH), meta(WIDTH, INNER)) in (WIDE, 2 * WIDE)


def test_an_operation_of_another_library_is_a_kernel_of_its_own() -> None:
    with torch.library._scoped_library("fused_test", "DEF") as library:
        library.define("gate(Tensor x) -> Tensor")
        library.impl("gate", torch.empty_like, "Meta")

        def gated_by_it(x: Tensor) -> Tensor:
            return torch.ops.fused_test.gate(x.square()).square()

        # What it reads, what it gives; then that and the result, or one over the other.
        assert forward_peak(gated_by_it, meta(TOKENS, WIDTH)) == 2 * HIDDEN


def test_buffers_are_gone_without_the_garbage_collector() -> None:
    linear = gradients_of(F.linear)  # a trace of an own autograd Function is a cycle

    def twice(x: Tensor, weight: Tensor) -> Tensor:
        return linear(x * 2, weight)

    gc.disable()
    try:
        with Meter() as meter:
            weight = leaf(meta(INNER, WIDTH))
            given = meter.now
            for _ in range(3):
                vjp(fused(twice), [leaf(meta(TOKENS, WIDTH)), weight], [meta(TOKENS, INNER)])
                assert meter.now == given
    finally:
        gc.enable()
