"""The operator pair: what compile, checkpoint policies and fake tensors see of a kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.attention.kernels import KERNELS, CpuFlash

OPS = torch.ops.torchtitan_lc
HERE = pytest.mark.parametrize("name", ["cpu", "math"])
BOUNDS = ((0, 3, 4, 11), (0, 11))
DOCUMENTS = pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["whole", "packed"])


def qkv(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Strided views of one wide tensor."""
    wide = torch.randn(2, 11, 8, 16, dtype=dtype)
    return [wide[:, :, :4], wide[:, :, 4:6], wide[:, :, 6:]]


@HERE
@DOCUMENTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_pass_torchs_own_checks(name: str, bounds: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = qkv(dtype=dtype)
    cu = Documents(bounds).cu_seqlens(torch.device("cpu")) if bounds else None
    how = (cu, 11 if bounds else 0, name, True, 0.25)
    torch.library.opcheck(OPS.attention_forward.default, (q, k, v, *how))
    out, lse = OPS.attention_forward(q, k, v, *how)
    dout = torch.randn(2, 4, 11, 16, dtype=dtype).transpose(1, 2)
    torch.library.opcheck(OPS.attention_backward.default, (dout, q, k, v, out, lse, *how))


def _run(name: str, bounds: Any, dtype: torch.dtype) -> list[Tensor]:
    q, k, v = qkv(dtype)
    documents = Documents(bounds) if bounds else None
    kernel = KERNELS[name]()
    out, lse = kernel.forward(q, k, v, causal=True, scale=0.25, documents=documents)
    dout = torch.empty_like(q)
    grads = kernel.backward(dout, q, k, v, out, lse, causal=True, scale=0.25, documents=documents)
    return [out, lse, *grads]


def _facts(tensors: list[Tensor]) -> list[Any]:
    return [(x.shape, x.stride(), x.dtype) for x in tensors]


@HERE
@DOCUMENTS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fake_results_have_the_shapes_and_strides_of_real_ones(
    name: str, bounds: Any, dtype: torch.dtype
) -> None:
    real = _facts(_run(name, bounds, dtype))
    with FakeTensorMode():
        assert _facts(_run(name, bounds, dtype)) == real


@DOCUMENTS
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_runs_on_fake_tensors_without_its_device_or_package(
    name: str, bounds: Any
) -> None:
    """As a dry run does it, with fake CPU tensors in place of those of the GPU."""
    want = _facts(_run("math", bounds, torch.bfloat16))
    with FakeTensorMode():
        assert _facts(_run(name, bounds, torch.bfloat16)) == want


class _Attention(torch.autograd.Function):
    """How the strategies use a kernel: explicitly in both directions."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = CpuFlash().forward(q, k, v, causal=True, scale=0.25)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        return CpuFlash().backward(dout.contiguous(), *ctx.saved_tensors, causal=True, scale=0.25)


def _block(x: Tensor) -> Tensor:
    return _Attention.apply(*(x * x).split([4, 2, 2], dim=2))


@pytest.mark.parametrize(("saved", "runs"), [(True, 1), (False, 2)])
def test_a_checkpoint_policy_can_name_attention_and_save_its_second_run(
    monkeypatch: pytest.MonkeyPatch, saved: bool, runs: int
) -> None:
    calls = []
    compute = CpuFlash.compute

    def counted(self: CpuFlash, *args: Any) -> Any:
        calls.append(1)
        return compute(self, *args)

    monkeypatch.setattr(CpuFlash, "compute", counted)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        mine = saved and op is OPS.attention_forward.default
        return CheckpointPolicy.MUST_SAVE if mine else CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.randn(2, 11, 8, 16, requires_grad=True)
    (want,) = torch.autograd.grad(_block(x).square().sum(), x)
    calls.clear()
    out = checkpoint(
        _block,
        x,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, policy),
    )
    (got,) = torch.autograd.grad(out.square().sum(), x)
    assert len(calls) == runs and torch.equal(got, want)


def test_compile_sees_through_attention_in_one_graph() -> None:
    x = torch.randn(2, 11, 8, 16, requires_grad=True)
    want = _block(x)
    got = torch.compile(_block, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(got, want)
    dout = torch.randn_like(want)
    (want_dx,) = torch.autograd.grad(want, x, dout)
    (got_dx,) = torch.autograd.grad(got, x, dout)
    torch.testing.assert_close(got_dx, want_dx)


def test_results_share_no_memory_with_inputs_where_arithmetic_would_allow_it() -> None:
    """One key: out is v. An operator that returned it as such would be changed with it."""
    q, k, v = (torch.randn(1, 1, 1, 8, dtype=torch.float64) for _ in range(3))
    for name in ("cpu", "math"):
        out, lse = KERNELS[name]().forward(q, k, v, causal=True, scale=1.0)
        grads = KERNELS[name]().backward(q, q, k, v, out, lse, causal=True, scale=1.0)
        inputs = {x.untyped_storage().data_ptr() for x in (q, k, v)}
        results = [x.untyped_storage().data_ptr() for x in (out, lse, *grads)]
        assert len(set(results)) == 5 and not inputs & set(results)
