"""Offload changes no bit, moves what it says and nothing else, and gives everything back."""

from __future__ import annotations

import functools
import gc
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.late_copies import LateCopies
from tests.offloaded import CALLS, LAYERS, STAGES, assert_same, build, loss_of, sizes, train
from tests.tiny import gradients
from torchtitan_lc.attention.half import AttentionHalf
from torchtitan_lc.attention.kernels import CpuFlash
from torchtitan_lc.memory.host_memory import HostMemory
from torchtitan_lc.memory.offload import HostStore, Offload, Parked
from torchtitan_lc.memory.placement import LayerPlacement

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Training collects garbage every so many steps: what a cycle keeps would stay until then."""
    gc.disable()
    yield
    gc.enable()


class Counting(CpuFlash):
    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["forward"] += 1
        return super().forward(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls["backward"] += 1
        return super().backward(*args, **kwargs)


def _settings(
    mode: str, every: int = 1, early: bool = False, offload: bool = True
) -> dict[str, Any]:
    return {
        "activation_checkpoint.mode": mode,
        "activation_checkpoint.block_inputs_every": every,
        "activation_offload.enable": offload,
        "activation_offload.early_fetch": early,
    }


def _placements(where: str, mode: Any, every: int) -> list[LayerPlacement] | None:
    """By hand, what the rules of placement.py would not choose; None: what they choose."""
    kept = [i % every == 0 for i in range(LAYERS)]
    choices: dict[str, list[LayerPlacement]] = {
        "inputs": [LayerPlacement(mode, k, input_on_host=k) for k in kept],
        "outputs": [LayerPlacement(mode, k, outputs_on_host=True) for k in kept],
        "some": [
            LayerPlacement(("full", mode, "selective")[i], k, k and i != 1, i != 0)
            for i, k in enumerate(kept)
        ],
    }
    return choices.get(where)


@functools.cache
def _plain(packed: bool, hold: bool, sum_kv: bool) -> list[Tensor]:
    settings = _settings("none", offload=False)
    model, _ = build(settings, hold_normed_input=hold, sum_kv_gradients=sum_kv)
    return train(model, packed=packed)


_WHERE = ("all", "nowhere", "inputs", "outputs", "some")
# Every third of all, which meets each pair of choices.
_GRID = list(itertools.product((1, 2, 3), ("selective", "full"), _WHERE, (False, True)))[::3]


@pytest.mark.parametrize(("number", "case"), list(enumerate(_GRID)), ids=str)
def test_losses_and_gradients_are_those_without_checkpoint_bit_for_bit(
    number: int, case: tuple[int, str, str, bool]
) -> None:
    every, mode, where, early = case
    packed, hold, sum_kv = number % 4 == 0, number % 3 == 0, number % 5 < 2
    copies = LateCopies(chance=0.3 * (number % 4 == 3), seed=number)
    model, offload = build(
        _settings(mode, every, early, offload=where != "nowhere"),
        copies=copies,
        placements=_placements(where, mode, every),
        hold_normed_input=hold,
        sum_kv_gradients=sum_kv,
    )
    assert_same(train(model, packed=packed), _plain(packed, hold, sum_kv))
    assert copies.faults == []
    assert (offload is None) == (where == "nowhere")
    assert bool(copies.sent) == (where != "nowhere")


@pytest.mark.parametrize("seed", range(3))
def test_copies_at_any_moment_that_the_waits_allow_change_no_bit(seed: int) -> None:
    copies = LateCopies(chance=(0.1, 0.5, 0.9)[seed], seed=seed)
    model, _ = build(_settings("selective", every=2 - seed % 2, early=seed == 1), copies=copies)
    strategy = model.execution.strategy
    plain = _plain(False, strategy.hold_normed_input, strategy.sum_kv_gradients)  # type: ignore[attr-defined]
    assert_same(train(model), plain)
    assert copies.faults == []


# -- what goes


@pytest.mark.parametrize(("every", "inputs"), [(1, 2), (2, 1), (3, 0)])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_block_inputs_but_the_last_and_attentions_outputs_go_and_nothing_else(
    mode: str, every: int, inputs: int
) -> None:
    copies = LateCopies()
    model, offload = build(_settings(mode, every), copies=copies)
    loss = loss_of(model)
    one = sizes()
    in_forward = Counter(copies.sent)
    assert in_forward[one.input] == inputs
    outputs = LAYERS * one.outputs
    assert sum(copies.sent) == inputs * one.input + outputs * (mode == "selective")
    loss.backward()
    # full: attention computed again passes through host memory, too.
    assert sum(copies.sent) == inputs * one.input + outputs
    assert len(copies.sent) == inputs + 2 * STAGES * LAYERS
    assert offload is not None and copies.faults == []


def test_without_offload_nothing_goes() -> None:
    copies = LateCopies()
    model, offload = build(_settings("selective", offload=False), copies=copies)
    loss_of(model).backward()
    assert offload is None and copies.sent == []


def test_what_does_not_fit_stays_or_is_computed_again() -> None:
    one = sizes()
    budget = 2 * one.input + 2 * one.outputs
    for layers, kept, again in (("auto", 1, 2), (3, 3, 0)):
        copies, kernel = LateCopies(), Counting()
        settings = {**_settings("selective"), "activation_checkpoint.selective_layers": layers}
        model, offload = build(settings, copies=copies, host_bytes=budget, kernel=kernel)
        loss = loss_of(model)
        on_host = 1 if layers == "auto" else 2
        assert sum(copies.sent) == 2 * one.input + on_host * one.outputs
        loss.backward()
        assert kernel.calls["forward"] == CALLS * (kept + 2 * again)
        assert offload is not None and offload.memory.allocated <= budget


def _watched(offload: Offload | None) -> list[Parked]:
    """Everything that is parked from now on."""
    assert offload is not None
    parked: list[Parked] = []
    park = offload.park

    def watched(x: Tensor) -> Parked:
        parked.append(park(x))
        return parked[-1]

    offload.park = watched  # type: ignore[method-assign]
    return parked


@pytest.mark.parametrize("every", [1, 2, 3])
def test_when_the_head_begins_nothing_offloaded_is_still_on_the_device(every: int) -> None:
    model, offload = build(_settings("selective", every), copies=LateCopies())
    parked = _watched(offload)
    left = []
    model.head.register_forward_pre_hook(
        lambda *_: left.append([x for x in parked if x._on_device is not None])
    )
    loss_of(model)
    assert parked and left == [[]]


# -- how often attention runs


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize(("mode", "forwards"), [("selective", 1), ("full", 2)])
def test_attention_runs_once_under_selective_and_twice_under_full(
    mode: str, forwards: int, every: int, offload: bool
) -> None:
    kernel = Counting()
    model, _ = build(_settings(mode, every, offload=offload), kernel=kernel)
    loss_of(model).backward()
    assert kernel.calls == {"forward": LAYERS * CALLS * forwards, "backward": LAYERS * CALLS}


# -- what is given back


def _free(memory: HostMemory) -> int:
    return sum(buffer.data.numel() for buffers in memory._free.values() for buffer in buffers)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_host_memory_is_that_of_the_first_step_and_all_free_after_each(
    mode: str, every: int
) -> None:
    copies = LateCopies()
    model, offload = build(_settings(mode, every), copies=copies)
    assert offload is not None
    allocated, blocks = [], []
    for _ in range(3):
        train(model, steps=1)
        allocated.append(offload.memory.allocated)
        blocks.append(len(offload._blocks))
        assert _free(offload.memory) == allocated[-1]
    one = sizes()
    starts = -(-LAYERS // every)
    outputs = LAYERS if mode == "selective" else every
    assert allocated == [(starts - 1) * one.input + outputs * one.outputs] * 3
    # The first micro-batch's loss is there until the second has one.
    assert blocks == [2 * LAYERS] * 3, "blocks of steps that are over are remembered"
    assert copies.faults == []


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_graph_thrown_away_gives_its_buffers_back(mode: str, every: int) -> None:
    copies = LateCopies()
    model, offload = build(_settings(mode, every), copies=copies)
    assert offload is not None
    for _ in range(3):
        loss = loss_of(model)
        del loss
        offload.settle()  # as the next forward does
        assert _free(offload.memory) == offload.memory.allocated
    seen = train(model)
    assert copies.faults == []
    assert_same(seen, train(build(_settings("none", offload=False))[0]))


class _Fails(CpuFlash):
    """In its second backward, once."""

    def __init__(self) -> None:
        self.backwards = 0

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        self.backwards += 1
        if self.backwards == CALLS + 2:
            raise RuntimeError("the kernel failed")
        return super().backward(*args, **kwargs)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_a_step_after_one_that_failed_in_backward_is_right(every: int, early: bool) -> None:
    copies = LateCopies()
    model, offload = build(
        _settings("selective", every, early), copies=copies, kernel=_Fails(), sum_kv_gradients=True
    )
    assert offload is not None
    loss = loss_of(model)
    with pytest.raises(RuntimeError, match="the kernel failed"):
        loss.backward()
    del loss
    model.zero_grad()
    gc.collect()  # the exception's traceback holds frames in a cycle
    offload.settle()
    assert _free(offload.memory) == offload.memory.allocated
    assert_same(train(model), _plain(False, False, True))
    assert copies.faults == []


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_graph_that_is_kept_goes_backward_twice(mode: str, every: int) -> None:
    copies = LateCopies()
    model, offload = build(_settings(mode, every), copies=copies)
    parked = _watched(offload)
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    assert all(x._on_device is None for x in parked), "left on the device after its use"
    once = {name: grad.clone() for name, grad in gradients(model).items()}
    loss.backward()
    for name, grad in gradients(model).items():
        assert torch.equal(grad, 2 * once[name]), name
    assert copies.faults == []


def test_two_graphs_at_once_go_backward_in_any_order() -> None:
    want, _ = build(_settings("none", offload=False))
    copies = LateCopies()
    model, _ = build(_settings("selective"), copies=copies)
    for order in ((0, 1), (1, 0)):
        for m in (want, model):
            m.zero_grad()
            losses = [loss_of(m, seed) for seed in (0, 1)]
            for i in order:
                losses[i].backward()
        assert_same(list(gradients(model).values()), list(gradients(want).values()))
    assert copies.faults == []


# -- one tensor


def _views() -> dict[str, Tensor]:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    return {
        "whole": x,
        "with an offset": x[1:],
        "transposed": x.t(),
        "strided": x[:, ::2],
        "expanded": x[:1].expand(4, -1),
        "a scalar": x[2, 3],
        "empty": x[:0],
        "bf16": x.bfloat16()[:, 1:],
        "integers": torch.arange(7)[2:],
    }


@pytest.mark.parametrize("kind", _views())
def test_a_view_comes_back_as_it_was(kind: str) -> None:
    copies = LateCopies()
    offload = Offload(HostMemory(CPU), copies)
    x = _views()[kind]
    want = x.clone()
    parked = offload.park(x)
    offload.let_go([parked])
    offload.settle()
    # Nothing of it is looked at any more.
    torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).zero_()
    for got in (parked.get(), parked.take()):
        assert torch.equal(got, want)
        assert got.dtype == want.dtype and got.shape == want.shape
    assert copies.faults == []
    assert offload.memory.allocated == want.nbytes == _free(offload.memory)


def _parked(copies: LateCopies) -> tuple[Offload, Any]:
    offload = Offload(HostMemory(CPU), copies)
    return offload, offload.park(torch.ones(4))


def test_a_tensor_leaves_behind_its_copy_and_is_there_before_its_use() -> None:
    copies = LateCopies()
    _, parked = _parked(copies)
    assert copies.pending == 1
    parked.leave()
    assert copies.pending == 0
    parked.fetch()
    parked.fetch()
    assert copies.pending == 1
    assert torch.equal(parked.get(), torch.ones(4)) and copies.pending == 0
    assert copies.faults == []


def test_a_tensor_that_has_not_left_is_used_without_a_wait_and_taken_behind_its_copy() -> None:
    copies = LateCopies()
    _, parked = _parked(copies)
    parked.get()
    assert copies.pending == 1, "a copy out only reads"
    parked.take()
    assert copies.pending == 0


@pytest.mark.parametrize("on_its_way", ["out", "back"])
def test_what_is_dropped_on_its_way_goes_behind_its_copy(on_its_way: str) -> None:
    copies = LateCopies()
    offload, parked = _parked(copies)
    if on_its_way == "back":
        parked.leave()
        parked.fetch()
    del parked
    assert copies.pending == 0 and copies.faults == []
    again = offload.park(torch.zeros(4))  # in the same buffer
    assert offload.memory.allocated == 16
    again.leave()
    assert torch.equal(again.get(), torch.zeros(4)) and copies.faults == []


@pytest.mark.parametrize("early", [False, True])
def test_a_block_input_comes_back_when_no_buffer_of_a_stage_is_left(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier it would fit beside them only in pieces; early, it comes before the last kernel runs."""
    order: list[str] = []

    def noted(owner: Any, method: str, event: str) -> None:
        real = getattr(owner, method)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            order.append(event)
            return real(*arguments, **options)

        monkeypatch.setattr(owner, method, wrapped)

    noted(AttentionHalf, "_stage_backward", "kernel")
    noted(AttentionHalf, "projection_backward", "projection")
    noted(AttentionHalf, "norm_backward", "norm")
    noted(HostStore, "fetch", "input")
    model, _ = build(_settings("selective", early=early))
    loss_of(model).backward()
    fetched = [i for i, event in enumerate(order) if event == "input"]
    assert len(fetched) == len(model.blocks) - 1, "nothing is before the first"
    for place in fetched:
        assert order[place + 1] == ("kernel" if early else "norm")
        assert "kernel" in order[:place] and order[place - 1] == "projection"


@pytest.mark.parametrize("back_runs_first", [False, True])
def test_copies_come_after_one_another_whatever_stream_waits(
    monkeypatch: pytest.MonkeyPatch, back_runs_first: bool
) -> None:
    copies = LateCopies()
    monkeypatch.setattr(
        copies, "wait", lambda copied: None
    )  # another stream than that of the copies
    offload, x = Offload(HostMemory(CPU), copies), torch.ones(4)
    parked = offload.park(x)
    parked.leave()
    parked.fetch()
    back = parked.get()
    if back_runs_first:
        copies.run(parked._copied)
    del parked
    y = torch.zeros(4)
    again = offload.park(y)  # in the same buffer
    copies.run(again._copied)
    assert copies.faults == [] and torch.equal(back, x)


# -- the copies of these tests


def test_late_copies_notice_what_a_gpu_would_not() -> None:
    def faults(misuse: Any) -> list[str]:
        copies = LateCopies()
        x, host, back = torch.ones(4), torch.zeros(4), torch.empty(4)
        misuse(copies, x, host, back)
        return list(copies.faults)

    def changed(copies: LateCopies, x: Tensor, host: Tensor, back: Tensor) -> None:
        copy = copies.out(x, host, None)
        x += 1
        copies.wait(copy)

    def freed(copies: LateCopies, x: Tensor, host: Tensor, back: Tensor) -> None:
        copies.out(x * 1, host, None)

    def read_early(copies: LateCopies, x: Tensor, host: Tensor, back: Tensor) -> None:
        copies.out(x, host, None)
        copies.wait(copies.back(host, back, None))

    def reused(copies: LateCopies, x: Tensor, host: Tensor, back: Tensor) -> None:
        copies.wait(copies.out(x, host, None))
        copies.back(host, back, None)
        twice = x * 2
        copies.wait(copies.out(twice, host, None))

    assert faults(changed) == ["a tensor was changed before its copy out ran"]
    assert faults(freed) == ["memory of a copy out was freed before it ran"]
    assert faults(read_early) == ["a host buffer was read before its copy out ran"]
    assert "a host buffer was overwritten before its copy back ran" in faults(reused)
