"""Peers compute the same block: output gradient in, gradients of input and weights out."""

from __future__ import annotations

import importlib.util
import sys
import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel

from benchmarks import fa4_for_torch
from benchmarks.blocks import BlockCase, Plan, Setting, cut, make_weights
from benchmarks.peers import (
    Attention,
    PeerBlock,
    _KernelAttention,
    flash_attention_4,
    make_peer,
)
from tests.helpers import run_distributed
from torchtitan_lc.attention.kernels import CpuFlash
from torchtitan_lc.models.llama3 import FLAVORS

S = 64
TILED = (
    512  # of which each of two ranks has more tokens than the model is wide: two tiles of TiledMLP
)
Grads = dict[str, Tensor]
Make = Callable[[Setting, dict[str, Tensor]], BlockCase | PeerBlock]

aten = torch.ops.aten


class Alone(PeerBlock):
    """What the peers share, with this project's kernel on one rank."""

    def attention(self) -> Attention:
        return lambda q, k, v: _KernelAttention.apply(CpuFlash(), q, k, v)


class Watched(Alone):
    """Notes what is held when nobody needs it: q in the MLP of the first forward pass, the block's output
    when backward recomputes the block."""

    def attention(self) -> Attention:
        self.held: list[bool] = []
        attend = super().attention()

        def watched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not self.held:
                self.watched = weakref.ref(q)
            return attend(q, k, v)

        return watched

    def mlp(self, h: Tensor, block: Any) -> Tensor:
        self.held.append(self.watched() is not None)
        y = super().mlp(h, block)
        self.watched = weakref.ref(y)
        return y


def _setting() -> Setting:
    args, cpu = cut(FLAVORS["debugmodel"], 1), torch.device("cpu")
    return Setting(args, cpu, torch.float32, 0, 0, False, True, False, False, "aot_eager")


def _in_order(seq_len: int) -> Tensor:
    """Places in the row of this rank's tokens."""
    return torch.arange(seq_len).chunk(dist.get_world_size())[dist.get_rank()]


def _head_and_tail(seq_len: int) -> Tensor:
    rank, chunks = dist.get_rank(), torch.arange(seq_len).chunk(2 * dist.get_world_size())
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def _grads(make: Make, seq_len: int, places: Callable[[int], Tensor] = _in_order) -> Grads:
    """Of all tokens, and of the weights summed over the ranks. Two steps: what one leaves, the next meets."""
    setting = _setting()
    torch.manual_seed(0)
    mine = places(seq_len)
    h = torch.randn(1, seq_len, setting.args.dim)[:, mine].clone().requires_grad_()
    built = make(setting, make_weights(setting))
    case = built.at(seq_len, h, {})
    case.step()
    case.clean()
    assert h.grad is None and all(p.grad is None for p in built.model.parameters())
    case.step()
    assert h.grad is not None
    found = {"h": torch.zeros(1, seq_len, setting.args.dim).index_copy(1, mine, h.grad)}
    for name, parameter in built.model.layers.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad.clone()
    for grad in found.values():
        dist.all_reduce(grad)
    return found


def _ours(
    rank: int, ranks: int, strategy: str, mode: str, offload: bool, seq_len: int = S
) -> Grads:
    plan = Plan(strategy, mode, "cpu", offload)
    return _grads(lambda setting, weights: BlockCase(plan, setting, weights), seq_len)


def _alone(rank: int, ranks: int) -> Grads:
    return _grads(lambda setting, weights: Alone(setting, weights, "cpu", False), S)


def _held(rank: int, ranks: int) -> list[bool]:
    setting = _setting()
    block = Watched(setting, make_weights(setting), "cpu", False)
    block.at(S, torch.randn(1, S, setting.args.dim, requires_grad=True), {}).step()
    return block.held


def _of_peer(
    name: str, compile: bool, seq_len: int, places: Callable[[int], Tensor] = _in_order
) -> Grads:
    def make(setting: Setting, weights: dict[str, Tensor]) -> PeerBlock:
        return make_peer(name, "cpu", setting, weights, compile)

    found = _grads(make, seq_len, places)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert (graphs > 0) == compile
    return found


def _deepspeed(rank: int, ranks: int, compile: bool) -> Grads:
    import deepspeed.comm  # type: ignore[import-not-found]  # noqa: F401

    # On a CPU it would compile an extension for all-reduce in shared memory.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    return _of_peer("deepspeed", compile, TILED)


def _local(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x


def _ring_forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    mesh = args[0].device_mesh
    q, k, v, dropout, causal = map(_local, args)
    found = context_parallel._templated_ring_attention(
        mesh.get_group(), 2, op, q, k, v, is_causal=causal, dropout_p=dropout, **kwargs
    )
    return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in found)


def _ring_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    mesh = args[0].device_mesh
    dout, q, k, v, out, lse, dropout, causal = map(_local, args)
    found = context_parallel._templated_ring_attention_backward(
        *(mesh.get_group(), 2, op, dout, "grad_out", q, k, v, out, lse, causal),
        dropout_p=dropout,
        **kwargs,
    )
    return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in found)


def _torch_cp(rank: int, ranks: int, name: str, compile: bool) -> tuple[Grads, int]:
    """Gradients, and how often attention ran forward. context_parallel brings CUDA's kernels into its ring,
    and so it is told of the CPU's."""
    calls = 0

    def counted(*call: Any) -> tuple[DTensor, ...]:
        nonlocal calls
        calls += 1
        return _ring_forward(*call)

    flash = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    handlers: dict[Any, Any] = context_parallel.custom_ops
    handlers |= {flash.default: counted, backward.default: _ring_backward}
    return _of_peer(name, compile, S, _head_and_tail), calls


def _assert_same(found: Grads, whole: Grads) -> None:
    torch.testing.assert_close(found["h"], whole["h"], rtol=1e-4, atol=1e-5)
    for name in whole.keys() - {"h"}:
        torch.testing.assert_close(found[name], whole[name], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def whole() -> Grads:
    return run_distributed(_ours, 1, "local", "none", False)[0]


@pytest.mark.parametrize(
    ("strategy", "mode", "offload"),
    [("upipe:1", "selective", True), ("upipe:2", "full", False), ("published", "full", True)],
)
def test_blocks_of_this_project_compute_the_same(
    whole: Grads, strategy: str, mode: str, offload: bool
) -> None:
    _assert_same(run_distributed(_ours, 2, strategy, mode, offload)[0], whole)


def test_what_peers_share_computes_the_same(whole: Grads) -> None:
    _assert_same(run_distributed(_alone, 1)[0], whole)


def test_peers_hold_no_more_than_their_own_code_would() -> None:
    assert run_distributed(_held, 1)[0] == [False, False]


@pytest.mark.parametrize(
    ("options", "compile"),
    [
        ("allgather:gqa:full", False),
        ("allgather:gqa:selective", True),
        ("alltoall:repeat:full", True),
        ("alltoall:gqa:selective", False),
    ],
)
def test_torchs_context_parallel_computes_the_same(
    whole: Grads, options: str, compile: bool
) -> None:
    found, calls = run_distributed(_torch_cp, 2, f"torch_cp:{options}", compile)[0]
    _assert_same(found, whole)
    steps = 2
    assert calls == (steps if options.endswith("selective") else 2 * steps)


@pytest.mark.parametrize("compile", [False, True])
def test_deepspeed_computes_the_same(compile: bool) -> None:
    pytest.importorskip("deepspeed", reason="no part of a test installation")
    whole = run_distributed(_ours, 1, "local", "none", False, TILED)[0]
    _assert_same(run_distributed(_deepspeed, 2, compile)[0], whole)


def test_torchs_switch_gets_of_flash_attn_4_what_it_unpacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = ModuleType("flash_attn.cute")
    package.interface = SimpleNamespace(  # type: ignore[attr-defined]
        _flash_attn_fwd=lambda q, *, causal: (f"out {q} {causal}", "lse", None, None, None),
        _flash_attn_bwd=lambda q, *, causal: (f"dq {q} {causal}", "dk", "dv", None),
    )
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    forward, backward = fa4_for_torch._flash_attn_fwd, fa4_for_torch._flash_attn_bwd
    assert forward("q", causal=True) == ("out q True", "lse")
    assert backward("q", causal=True) == ("dq q True", "dk", "dv")


def test_flash_attn_4_is_sdpas_kernel_within_its_context_alone() -> None:
    def is_ours() -> bool:
        return "_fa4.py" in torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention")

    for _ in range(2):
        with flash_attention_4():
            assert is_ours()
        assert not is_ours()


def _refusals(rank: int, ranks: int, names: list[str]) -> list[str]:
    setting, said = _setting(), []
    for name in names:
        try:
            make_peer(name, "cpu", setting, make_weights(setting), False)
        except (ValueError, ImportError) as error:
            said.append(str(error))
    return said


def test_a_peer_that_cannot_be_had_says_why() -> None:
    names = ["megatron", "torch_cp:alltoall:gqa", "torch_cp:alltoall:gqa:none"]
    if importlib.util.find_spec("deepspeed") is None:
        names.append("deepspeed")
    said = run_distributed(_refusals, 1, names)[0]
    assert len(said) == len(names)
    assert all(name.split(":")[0] in text for name, text in zip(names, said, strict=True))
