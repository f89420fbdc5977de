"""The adapters of kernels with a packed form, around stand-ins that compute on the CPU in fp64.

The stand-ins take the arguments and layouts of flash-attn-4 4.0.0b36, FlashAttention-3's operators,
flash-attn 2.8 and torch's own operator; whether those are right themselves is for tests/gpu.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.attention.test_kernels import PACKED, check, random_qkv
from tests.unit.attention.test_kernels_reference import Bounds
from torchtitan_lc.attention.kernels import KERNELS, CpuFlash, FlashAttention3


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, most: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """[B, S, n, D] with lse [B, n, S]; with cu [T, n, D] with lse [n, T]."""
    row_forward = CpuFlash().row_forward
    if cu is None:
        out, lse = row_forward(q, k, v, causal, scale)
        return out, lse.contiguous()
    assert cu.dtype == torch.int32 and most >= cu.diff().max()
    parts = []
    for a, b in pairwise(cu.tolist()):
        one = [x[a:b].unsqueeze(0) for x in (q, k, v)]
        parts.append(row_forward(one[0], one[1], one[2], causal, scale))
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)


def flash_backward(
    tensors: tuple[Tensor, ...], lse: Tensor, cu: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """tensors: dout, q, k, v, out."""
    row_backward = CpuFlash().row_backward
    assert lse.is_contiguous()
    if cu is None:
        dout, q, k, v, out = tensors
        return row_backward(dout, q, k, v, out, lse, causal, scale)
    parts = []
    for a, b in pairwise(cu.tolist()):
        dout, q, k, v, out = (x[a:b].unsqueeze(0) for x in tensors)
        part = lse[:, a:b].unsqueeze(0).contiguous()
        parts.append(row_backward(dout, q, k, v, out, part, causal, scale))
    return tuple(torch.cat([grads[i][0] for grads in parts]) for i in range(3))


def write(targets: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
    for target, grad in zip(targets, grads, strict=True):
        assert target.is_contiguous()
        target.copy_(grad)


def varlen(how: dict[str, Any]) -> tuple[Tensor | None, int]:
    """Take the arguments for packed rows out of ``how``."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    cu_q, cu_k, max_q, max_k = (how.pop(name, None) for name in names)
    assert cu_q is cu_k and max_q == max_k
    return cu_q, max_q or 0


def fa4() -> dict[str, Any]:
    def forward(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Any, ...]:
        cu, most = varlen(how)
        causal, scale = how.pop("causal"), how.pop("softmax_scale")
        assert how == {"return_lse": True}
        return (*flash_forward(q, k, v, cu, most, causal, scale), None, None, None)

    def backward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, **how: Any
    ) -> None:
        cu, _ = varlen(how)
        causal, scale = how.pop("causal"), how.pop("softmax_scale")
        targets = how.pop("dq"), how.pop("dk"), how.pop("dv")
        assert how == {"deterministic": False}
        write(targets, flash_backward((dout, q, k, v, out), lse, cu, causal, scale))

    return {"_flash_attn_fwd": forward, "_flash_attn_bwd": backward}


def fa3() -> SimpleNamespace:
    def forward(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Any, ...]:
        cu, most = varlen(how)
        causal, scale = how.pop("is_causal"), how.pop("softmax_scale")
        assert how == {"num_splits": 1}
        return (*flash_forward(q, k, v, cu, most, causal, scale), None, None)

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **how: Any
    ) -> None:
        cu, _ = varlen(how)
        causal, scale = how.pop("is_causal"), how.pop("softmax_scale")
        targets = how.pop("dq"), how.pop("dk"), how.pop("dv")
        assert how == {"deterministic": False}
        write(targets, flash_backward((dout, q, k, v, out), lse, cu, causal, scale))

    return SimpleNamespace(fwd=forward, bwd=backward)


PLAIN = {
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}


def fa2() -> dict[str, Any]:
    def forward(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Any, ...]:
        cu, most = varlen(how)
        causal, scale = how.pop("causal"), how.pop("softmax_scale")
        assert how == {**PLAIN, "return_softmax": False}
        return (*flash_forward(q, k, v, cu, most, causal, scale), None, None)

    def backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *dqkv: Any,
        **how: Any,
    ) -> None:
        cu, _ = varlen(how)
        causal, scale = how.pop("causal"), how.pop("softmax_scale")
        assert how == {**PLAIN, "deterministic": False}
        write(dqkv, flash_backward((dout, q, k, v, out), lse, cu, causal, scale))

    def only(packed: bool, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            assert ("cu_seqlens_q" in how) == packed
            assert not packed or how["max_seqlen_q"] > 1, "its lse would be in another order"
            return run(*args, **how)

        return call

    return {
        "_flash_attn_forward": only(False, forward),
        "_flash_attn_backward": only(False, backward),
        "_flash_attn_varlen_forward": only(True, forward),
        "_flash_attn_varlen_backward": only(True, backward),
    }


def sdpa() -> SimpleNamespace:
    def forward(q: Tensor, k: Tensor, v: Tensor, *how: Any, scale: float) -> tuple[Any, ...]:
        cu_q, cu_k, max_q, _, dropout, causal, debug = how
        assert cu_q is cu_k and dropout == 0.0 and debug is False
        assert cu_q is None or max_q > 1, "its lse would be in another order"
        return (*flash_forward(q, k, v, cu_q, max_q, causal, scale), None, None, None)

    def backward(*args: Any, scale: float) -> tuple[Tensor, ...]:
        *tensors, lse, cu_q, cu_k, _, _, dropout, causal, _, _ = args
        assert cu_q is cu_k and dropout == 0.0
        return flash_backward(tuple(tensors), lse, cu_q, causal, scale)

    return SimpleNamespace(_flash_attention_forward=forward, _flash_attention_backward=backward)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, dict[str, Any]] = {
        "flash_attn": {},
        "flash_attn.cute": {},
        "flash_attn.cute.interface": fa4(),
        "flash_attn.flash_attn_interface": fa2(),
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(FlashAttention3, "_operators", staticmethod(fa3))
    monkeypatch.setattr("torchtitan_lc.attention.kernels.cuda._aten", sdpa())


@pytest.mark.parametrize("name", ["fa4", "fa3", "fa2", "sdpa"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bounds", [None, *PACKED.values()], ids=["whole rows", *PACKED])
def test_layouts_survive_the_way_to_the_package_and_back(
    stand_ins: None, name: str, causal: bool, bounds: Bounds | None
) -> None:
    torch.manual_seed(0)
    qkv = random_qkv(len(bounds) if bounds else 2, 4, 2)
    check(KERNELS[name](), torch.randn_like(qkv[0]), qkv, causal, bounds)


@pytest.mark.parametrize("name", ["fa2", "sdpa"])
def test_rows_of_nothing_but_one_token_documents_take_no_decoding_path(
    stand_ins: None, name: str
) -> None:
    qkv = random_qkv(2, 4, 2)
    bounds = (tuple(range(qkv[0].shape[1] + 1)),) * 2
    check(KERNELS[name](), torch.randn_like(qkv[0]), qkv, True, bounds)


@pytest.mark.parametrize("name", ["fa4", "fa3", "fa2", "sdpa", "cpu", "math"])
@pytest.mark.parametrize("bounds", [None, PACKED["rows differ"]], ids=["whole rows", "packed"])
def test_results_are_plain_where_inputs_lie_heads_first_in_memory(
    stand_ins: None, name: str, bounds: Bounds | None
) -> None:
    qkv = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in random_qkv(3, 4, 2)]
    check(KERNELS[name](), torch.randn_like(qkv[0]), qkv, True, bounds)
