"""Peers compute the same block: output gradient in, gradients of input and weights out."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.blocks import BlockCase, Plan, Setting, cut, make_weights
from benchmarks.peers import Attention, PeerBlock, _KernelAttention, make_peer
from tests.helpers import run_distributed
from torchtitan_lc.attention.kernels import CpuFlash
from torchtitan_lc.models.llama3 import FLAVORS

S = 64
Grads = dict[str, Tensor]


class Alone(PeerBlock):
    """What the peers share, with this project's kernel on one rank."""

    def attention(self) -> Attention:
        return lambda q, k, v: _KernelAttention.apply(CpuFlash(), q, k, v)


def _setting() -> Setting:
    args, cpu = cut(FLAVORS["debugmodel"], 1), torch.device("cpu")
    return Setting(args, cpu, torch.float32, 0, 0, False, True, False, False, "eager")


def _grads(make: Callable[[Setting, dict[str, Tensor]], BlockCase | PeerBlock]) -> Grads:
    """Of this rank's tokens, and of the weights summed over the ranks."""
    setting = _setting()
    torch.manual_seed(0)
    h = torch.randn(1, S, setting.args.dim).chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
    h = h.clone().requires_grad_()
    built = make(setting, make_weights(setting))
    case = built.at(S, h, {})
    case.step()
    found = {"h": h.grad}
    for name, parameter in built.model.layers.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        found[name] = parameter.grad.clone()
    case.clean()
    assert h.grad is None and all(p.grad is None for p in built.model.parameters())
    return {name: grad for name, grad in found.items() if grad is not None}


def _ours(rank: int, ranks: int, strategy: str, mode: str, offload: bool) -> Grads:
    plan = Plan(strategy, mode, "cpu", offload)
    return _grads(lambda setting, weights: BlockCase(plan, setting, weights))


def _alone(rank: int, ranks: int) -> Grads:
    return _grads(lambda setting, weights: Alone(setting, weights, "cpu"))


def _deepspeed(rank: int, ranks: int) -> Grads:
    import deepspeed.comm  # type: ignore[import-not-found]  # noqa: F401

    # On a CPU it would compile an extension for all-reduce in shared memory.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    return _grads(lambda setting, weights: make_peer("deepspeed", "cpu", setting, weights))


def _assert_same(ranks: list[Grads], whole: Grads) -> None:
    together = torch.cat([found["h"] for found in ranks], dim=1)
    torch.testing.assert_close(together, whole["h"], rtol=1e-4, atol=1e-5)
    for name in whole.keys() - {"h"}:
        torch.testing.assert_close(ranks[0][name], whole[name], rtol=1e-4, atol=1e-4)


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
    _assert_same(run_distributed(_ours, 2, strategy, mode, offload), whole)


def test_what_peers_share_computes_the_same(whole: Grads) -> None:
    _assert_same(run_distributed(_alone, 1), whole)


def test_deepspeed_computes_the_same(whole: Grads) -> None:
    pytest.importorskip("deepspeed", reason="no part of a test installation")
    _assert_same(run_distributed(_deepspeed, 2), whole)


def _refusals(rank: int, ranks: int, names: list[str]) -> list[str]:
    setting, said = _setting(), []
    for name in names:
        try:
            make_peer(name, "cpu", setting, make_weights(setting))
        except (ValueError, ImportError) as error:
            said.append(str(error))
    return said


def test_a_peer_that_cannot_be_had_says_why() -> None:
    names = ["megatron", "torch_cp:alltoall"]
    if importlib.util.find_spec("deepspeed") is None:
        names.append("deepspeed")
    said = run_distributed(_refusals, 1, names)[0]
    assert len(said) == len(names)
    assert all(name.split(":")[0] in text for name, text in zip(names, said, strict=True))
