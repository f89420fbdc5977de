"""Stages of one rank: same numbers, one kernel call per head and direction, nothing full-size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference import reference_step
from tests.tiny import FLAVORS, gradients, masked_rows
from torchtitan_lc.attention.base import ALONE
from torchtitan_lc.attention.kernels import CpuFlash
from torchtitan_lc.attention.upipe import UPipe
from torchtitan_lc.memory.checkpointing import Mode, checkpoint_block, layer_modes
from torchtitan_lc.models.decoder.model import Decoder


class CountingKernel(CpuFlash):
    def __init__(self) -> None:
        self.forwards = self.backwards = 0
        self.heads: list[int] = []

    def forward(self, q: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.forwards += 1
        self.heads.append(q.shape[2])
        return super().forward(q, *args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        self.backwards += 1
        return super().backward(*args, **kwargs)


def _keep(model: Decoder, mode: Mode, selective_layers: int = 2) -> None:
    modes = layer_modes(mode, selective_layers, len(model.layers))
    for block, its_mode in zip(model.blocks, modes, strict=True):
        block.checkpoint = checkpoint_block(its_mode)


def _run(
    heads: int, mode: Mode, selective_layers: int = 2
) -> tuple[CountingKernel, float, dict[str, Tensor]]:
    model = Decoder(FLAVORS["gqa"])
    model.init_weights(seed=0)
    kernel = CountingKernel()
    execution = model.execution
    execution.strategy = UPipe(kernel, ulysses=ALONE, heads_per_stage=heads, tile_tokens=13)
    _keep(model, mode, selective_layers)
    rows = masked_rows(2, 64)
    loss = model(rows["tokens"], rows["positions"], rows["labels"])
    n = (rows["labels"] != -100).sum()
    (loss / n).backward()
    return kernel, loss.item() / n.item(), gradients(model)


@pytest.mark.parametrize(("mode", "per_layer"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_runs_the_attention_forward_once_and_full_twice(
    mode: Mode, per_layer: int
) -> None:
    kernel, _, _ = _run(2, mode)
    layers, stages = 2, 4
    assert kernel.forwards == layers * stages * per_layer
    assert kernel.backwards == layers * stages
    assert set(kernel.heads) == {2}, "a stage works on heads_per_stage heads"


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_any_number_of_heads_per_stage_equals_the_reference(heads: int) -> None:
    args = FLAVORS["gqa"]
    model = Decoder(args)
    model.init_weights(seed=0)
    want_loss, want = reference_step(model, args, masked_rows(2, 64))
    _, loss, grads = _run(heads, "selective")
    assert abs(loss - want_loss) < 1e-6
    for name, grad in want.items():
        assert (grads[name] - grad).norm() <= 1e-5 * grad.norm(), name


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointing_changes_no_bit(mode: Mode) -> None:
    _, loss, grads = _run(2, "none")
    _, loss_again, grads_again = _run(2, mode)
    assert loss == loss_again
    assert all(torch.equal(grads[name], grads_again[name]) for name in grads)


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_every_mode_allows_a_second_backward(mode: Mode) -> None:
    model = Decoder(FLAVORS["mha"])
    model.init_weights(seed=0)
    _keep(model, mode)
    rows = masked_rows(1, 64)
    loss = model(rows["tokens"], rows["positions"], rows["labels"])
    loss.backward(retain_graph=True)
    once = {name: grad.clone() for name, grad in gradients(model).items()}
    loss.backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, 2 * once[name])


@pytest.mark.parametrize("selective_layers", [0, 1, 2])
def test_only_the_last_layers_keep_attention_when_a_number_is_named(selective_layers: int) -> None:
    kernel, loss, grads = _run(8, "selective", selective_layers)
    assert kernel.forwards == 2 + (2 - selective_layers)  # one stage a layer, again where not kept
    _, want_loss, want = _run(8, "none")
    assert loss == want_loss and all(torch.equal(grads[n], want[n]) for n in want)
    assert layer_modes("selective", 1, 3) == ["full", "full", "selective"]


def test_holding_the_normed_input_changes_no_bit() -> None:
    def gradients(hold: bool) -> list[Tensor]:
        model = Decoder(FLAVORS["gqa"])
        model.init_weights(seed=0)
        model.execution.strategy = UPipe(
            CpuFlash(),
            ulysses=ALONE,
            heads_per_stage=2,
            tile_tokens=13,
            hold_normed_input=hold,
        )
        rows = masked_rows(2, 64)
        loss = model(rows["tokens"], rows["positions"], rows["labels"])
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    for made, held in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(made, held)


def test_more_selective_layers_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="selective_layers = 3.*2 layers"):
        layer_modes("selective", 3, 2)
