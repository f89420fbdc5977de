"""Which kernel a job gets, why, and what is said when the named one cannot do it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_lc.attention.documents import Documents
from torchtitan_lc.attention.kernels import KERNELS, CpuFlash, choose_kernel
from torchtitan_lc.attention.kernels.choice import ByRows
from torchtitan_lc.attention.kernels.packages import installed

BF16 = torch.bfloat16


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPU and without the optional packages."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("torchtitan_lc.attention.kernels.packages.installed", lambda name: False)


def _install(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    monkeypatch.setattr(
        "torchtitan_lc.attention.kernels.packages.installed", lambda name: name in packages
    )


def _gpu(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))


FA4, FA3, FA2 = "flash_attn.cute", "flash_attn_interface", "flash_attn.flash_attn_interface"


@pytest.mark.parametrize(
    ("packages", "head_dim", "packed", "chosen"),
    [
        ((FA4, FA3, FA2), 128, False, "fa4"),
        ((FA4,), 256, True, "fa4"),
        ((FA3, FA2), 128, True, "fa3"),
        ((FA2,), 128, False, "cudnn"),
        ((), 96, False, "cudnn"),
        ((), 96, True, "cudnn, for packed rows sdpa"),  # cudnn has no packed form
        ((), 256, False, "sdpa"),  # cudnn stops at 128
        ((FA2,), 256, True, "sdpa"),
    ],
)
def test_auto_on_a_gpu_takes_the_fastest_that_can(
    monkeypatch: pytest.MonkeyPatch,
    packages: tuple[str, ...],
    head_dim: int,
    packed: bool,
    chosen: str,
) -> None:
    _gpu(monkeypatch, 9)
    _install(monkeypatch, *packages)
    choice = choose_kernel("auto", device_type="cuda", dtype=BF16, head_dim=head_dim, packed=packed)
    assert choice.kernel.name == chosen
    assert str(head_dim) in choice.reason and ("packed" in choice.reason) == packed
    assert ("pip install -e '.[fa4]'" in choice.reason) == (FA4 not in packages)


@pytest.mark.parametrize(
    ("major", "head_dim", "chosen"), [(8, 128, "cudnn"), (10, 192, "sdpa"), (7, 64, "math")]
)
def test_auto_takes_no_kernel_that_the_gpu_cannot_run(
    monkeypatch: pytest.MonkeyPatch, major: int, head_dim: int, chosen: str
) -> None:
    _gpu(monkeypatch, major)
    _install(monkeypatch, FA4, FA3)
    choice = choose_kernel("auto", device_type="cuda", dtype=BF16, head_dim=head_dim)
    assert choice.kernel.name == chosen


@pytest.mark.parametrize("packed", [True, False])
def test_auto_takes_the_cpu_kernel_on_a_cpu_and_says_what_packing_costs(
    bare: None, packed: bool
) -> None:
    choice = choose_kernel(
        "auto", device_type="cpu", dtype=torch.float32, head_dim=64, packed=packed
    )
    assert choice.kernel.name == "cpu" and "cpu" in choice.reason
    assert ("one call per document" in choice.reason) == packed
    assert "fa4" not in choice.reason, "that would not help here"


def test_auto_without_a_fused_kernel_says_that_memory_is_quadratic(bare: None) -> None:
    choice = choose_kernel("auto", device_type="cuda", dtype=torch.float32, head_dim=64)
    assert choice.kernel.name == "math" and "squared" in choice.reason


@pytest.mark.parametrize(
    ("name", "device", "dtype", "head_dim", "word"),
    [
        ("cudnn", "cpu", BF16, 64, "CUDA"),
        ("cudnn", "cuda", torch.float32, 64, "bfloat16"),
        ("cudnn", "cuda", BF16, 256, "sdpa or fa4"),
        ("sdpa", "cuda", BF16, 100, "100"),
        ("cpu", "cuda", torch.float32, 64, "cuda"),
        ("fa4", "cuda", BF16, 64, r"pip install -e '.\[fa4\]'"),
        ("fa4", "cpu", BF16, 64, "use cpu"),
        ("fa3", "cuda", BF16, 64, "flash_attn_interface"),
        ("fa2", "cuda", BF16, 64, "pip install flash-attn "),
    ],
)
def test_a_named_kernel_that_cannot_do_the_case_is_an_error_that_says_what_can(
    bare: None, name: str, device: str, dtype: torch.dtype, head_dim: int, word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        choose_kernel(name, device_type=device, dtype=dtype, head_dim=head_dim)


def test_a_named_kernel_without_a_packed_form_does_packed_rows_and_says_the_price(
    bare: None,
) -> None:
    choice = choose_kernel("cudnn", device_type="cuda", dtype=BF16, head_dim=64, packed=True)
    assert choice.kernel.name == "cudnn" and "one call per document" in choice.reason


def test_every_kernel_is_known_under_its_own_name() -> None:
    assert all(KERNELS[name].name == name for name in KERNELS)


# -- packages are found without being imported

LOUD = "raise AssertionError('imported')\n"


def _package(root: Path, files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(LOUD)
    monkeypatch.setattr(sys, "path", [str(root)])
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("files", "has_fa4", "has_fa2"),
    [
        (["flash_attn/cute/__init__.py"], True, False),
        (["flash_attn/__init__.py", "flash_attn/flash_attn_interface.py"], False, True),
        (
            [
                "flash_attn/__init__.py",
                "flash_attn/flash_attn_interface.py",
                "flash_attn/cute/__init__.py",
            ],
            True,
            True,
        ),
        (["flash_attn/cute/__pycache__/left_behind.py"], False, False),
        (["flash_attn.py"], False, False),
        ([], False, False),
    ],
)
def test_flash_attn_2_and_4_share_a_name_and_are_told_apart_unimported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: list[str],
    has_fa4: bool,
    has_fa2: bool,
) -> None:
    _package(tmp_path, files, monkeypatch)
    assert installed(FA4) == has_fa4
    assert installed(FA2) == has_fa2
    assert "flash_attn" not in sys.modules


def test_flash_attn_3_is_found_by_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not installed(FA3)
    _package(tmp_path, ["flash_attn_interface.py"], monkeypatch)
    assert installed(FA3)


def test_rows_of_several_documents_go_to_the_kernel_that_has_a_form_for_them() -> None:
    class Named(CpuFlash):
        def __init__(self, calls: list[str], label: str) -> None:
            self.calls, self.label = calls, label

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(self.label)
            return super().forward(*args, **kwargs)

        def backward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(self.label)
            return super().backward(*args, **kwargs)

    calls: list[str] = []
    kernel = ByRows(Named(calls, "whole"), Named(calls, "packed"))
    q, k, v, dout = torch.randn(4, 1, 6, 2, 8)
    for documents in (None, Documents(((0, 2, 6),))):
        out, lse = kernel.forward(q, k, v, causal=True, scale=0.3, documents=documents)
        kernel.backward(dout, q, k, v, out, lse, causal=True, scale=0.3, documents=documents)
    assert calls == ["whole", "whole", "packed", "packed"]
