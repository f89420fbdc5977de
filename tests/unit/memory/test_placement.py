"""What is kept where, from sizes alone: the rules of placement.py, for any sizes and any budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_lc.memory.checkpointing import layer_modes
from torchtitan_lc.memory.placement import (
    LayerPlacement,
    Sizes,
    host_bytes_needed,
    is_roomy,
    place_layers,
)

PLENTY = 2**62


@dataclass(frozen=True)
class Ask:
    n_layers: int
    sizes: Sizes
    mode: Any
    selective_layers: Any
    every: int
    host_bytes: int

    def place(self, host_bytes: int | None = None) -> list[LayerPlacement]:
        return place_layers(
            self.n_layers,
            self.sizes,
            mode=self.mode,
            selective_layers=self.selective_layers,
            every=self.every,
            host_bytes=self.host_bytes if host_bytes is None else host_bytes,
        )

    @property
    def starts(self) -> list[int]:
        return list(range(0, self.n_layers, self.every))


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    n = draw(st.integers(1, 9))
    one = st.integers(1, 12)
    return Ask(
        n,
        Sizes(draw(one), draw(one)),
        draw(st.sampled_from(["none", "full", "selective"])),
        draw(st.one_of(st.just("auto"), st.integers(0, n))),
        draw(st.integers(1, n + 2)),
        draw(st.integers(0, 24 * n)),
    )


@given(asks())
@settings(deadline=None, max_examples=300)
def test_the_host_never_holds_more_than_its_budget(ask: Ask) -> None:
    assert host_bytes_needed(ask.place(), ask.sizes) <= ask.host_bytes
    assert ask.place() == ask.place()


@given(asks())
@settings(deadline=None, max_examples=300)
def test_inputs_go_from_the_first_on_as_far_as_they_fit_and_the_last_stays(ask: Ask) -> None:
    layers = ask.place()
    assert [i for i, layer in enumerate(layers) if layer.keeps_input] == ask.starts
    gone = [i for i, layer in enumerate(layers) if layer.input_on_host]
    fit = min(len(ask.starts) - 1, ask.host_bytes // ask.sizes.input)
    assert gone == ([] if ask.mode == "none" else ask.starts[:fit])


@given(asks())
@settings(deadline=None, max_examples=300)
def test_outputs_that_are_kept_go_from_the_last_on_as_far_as_they_fit(ask: Ask) -> None:
    layers = ask.place()
    wanted = ask.n_layers if ask.selective_layers == "auto" else ask.selective_layers
    asked = layer_modes(ask.mode, wanted, ask.n_layers)
    kept = [i for i, layer in enumerate(layers) if layer.mode == "selective"]
    gone = [i for i in kept if layers[i].outputs_on_host]
    assert gone == kept[len(kept) - len(gone) :]
    if ask.mode == "selective" and ask.selective_layers == "auto" and ask.host_bytes:
        assert kept == gone, "what does not fit is computed again"
        assert kept == list(range(ask.n_layers))[ask.n_layers - len(kept) :]
    else:
        assert [layer.mode for layer in layers] == asked
    if ask.mode == "selective" and ask.host_bytes and len(gone) < wanted:
        # One more would not fit, beside the room of a segment that computes attention again, if one does.
        used = sum(x.input_on_host for x in layers) * ask.sizes.input
        used += (len(gone) + 1) * ask.sizes.outputs
        none_again = len(gone) + 1 == ask.n_layers or ask.selective_layers == ask.n_layers
        again = 0 if none_again else min(ask.every, ask.n_layers)
        assert used + again * ask.sizes.outputs > ask.host_bytes


@given(asks())
@settings(deadline=None, max_examples=300)
def test_outputs_computed_again_pass_through_the_host_if_those_of_a_segment_fit(ask: Ask) -> None:
    layers = ask.place()
    again = [layer for layer in layers if layer.mode == "full"]
    used = sum(x.input_on_host for x in layers) * ask.sizes.input
    used += sum(x.outputs_on_host and x.mode == "selective" for x in layers) * ask.sizes.outputs
    room = min(ask.every, ask.n_layers) * ask.sizes.outputs
    fits = ask.host_bytes > 0 and ask.host_bytes - used >= room
    assert all(layer.outputs_on_host == fits for layer in again)


@given(asks())
@settings(deadline=None, max_examples=100)
def test_with_plenty_all_goes_but_the_last_input_and_with_nothing_nothing(ask: Ask) -> None:
    wanted = ask.n_layers if ask.selective_layers == "auto" else ask.selective_layers
    modes = layer_modes(ask.mode, wanted, ask.n_layers)
    on = ask.mode != "none"
    for i, layer in enumerate(ask.place(PLENTY)):
        start = i in ask.starts
        assert layer == LayerPlacement(modes[i], start, on and i in ask.starts[:-1], on)
    for i, layer in enumerate(ask.place(0)):
        assert layer == LayerPlacement(modes[i], i in ask.starts)


def test_eight_layers_of_a_small_budget() -> None:
    """Worked by hand: 10 for an input, 11 for outputs, 7 inputs and the outputs of 3 layers."""
    layers = place_layers(8, Sizes(10, 11), mode="selective", host_bytes=70 + 33)
    assert [layer.input_on_host for layer in layers] == [True] * 7 + [False]
    # One of the three is for the layer that computes its attention again.
    assert [layer.mode for layer in layers] == ["full"] * 6 + ["selective"] * 2
    assert all(layer.outputs_on_host for layer in layers)
    assert host_bytes_needed(layers, Sizes(10, 11)) == 70 + 33
    named = place_layers(8, Sizes(10, 11), mode="selective", selective_layers=8, host_bytes=70 + 33)
    assert [layer.mode for layer in named] == ["selective"] * 8
    assert [layer.outputs_on_host for layer in named] == [False] * 5 + [True] * 3


def test_a_number_of_layers_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="selective_layers = 9.*8 layers"):
        place_layers(8, Sizes(1, 1), mode="selective", selective_layers=9, host_bytes=PLENTY)


def test_a_buffer_is_roomy_up_to_a_64th() -> None:
    assert is_roomy(2, 128) and not is_roomy(2, 127)
