"""What a GPU has allocated at each kind of moment of a step, layer by layer: the parts of a job put together.

forward     gathering the weights of a layer | the layer
loss        forward, which makes the gradients | backward | reducing those of the head
backward    making the inputs of a segment again | MLP half | attention half | reducing the gradients
the end     embedding | optimizer
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtitan_lc.plan.activations import Activations
from torchtitan_lc.plan.job import Job
from torchtitan_lc.plan.state import Sharded
from torchtitan_lc.plan.terms import Moment, moment


@dataclass(frozen=True)
class LayerMoments:
    """Of every layer, by kind; ``making`` of those that end a segment of several."""

    gathering: list[Moment] = field(default_factory=list)
    forward: list[Moment] = field(default_factory=list)
    making: list[Moment] = field(default_factory=list)
    mlp: list[Moment] = field(default_factory=list)
    attention: list[Moment] = field(default_factory=list)
    reducing: list[Moment] = field(default_factory=list)


def planned_moments(job: Job, activations: Activations, state: Sharded) -> list[Moment]:
    """In the order of the step, each kind at its fullest layer."""
    layers = layer_moments(job, activations, state)
    always = _always(job, activations, state)
    hidden, head = job.hidden, len(job.layers) + 1
    loss_forward, loss_backward = activations.loss_costs
    saved = [_saved(job, index) for index in range(len(job.layers))]
    everything = _total(saved)
    dx = {"gradient of the hidden state": hidden}
    vocabulary = state.units[0].padded(1) * job.itemsize
    embedding = {"weight gradients": vocabulary, "gradient of the block's output": hidden}

    def loss(name: str, *parts: dict[str, int]) -> Moment:
        return moment(name, always, everything, dx, *parts)

    def fullest(moments: list[Moment]) -> list[Moment]:
        return [max(moments, key=lambda m: m.total)] if moments else []

    return [
        *fullest(layers.gathering),
        *fullest(layers.forward),
        loss(
            "loss",
            state.in_forward(head),
            {"final hidden state": hidden, "loss tile and head gradients": loss_forward.peak},
        ),
        loss(
            "backward of the loss",
            state.in_backward(head),
            dx,
            {"loss tile and head gradients": loss_backward.peak},
        ),
        loss("reducing the gradients of the head", state.after_backward(head)),
        *fullest(layers.making),
        *fullest(layers.mlp),
        *fullest(layers.attention),
        *fullest(layers.reducing),
        moment("backward of the embedding", always, state.in_backward(0), embedding),
        moment("reducing the gradients of the embedding", always, state.after_backward(0)),
        moment("optimizer", state.between_steps(), state.in_optimizer()),
    ]


def layer_moments(job: Job, activations: Activations, state: Sharded) -> LayerMoments:
    found = LayerMoments()
    always = _always(job, activations, state)
    saved = [_saved(job, index) for index in range(len(job.layers))]
    before = [_total(saved[:index]) for index in range(len(saved) + 1)]
    dy = {"gradient of the block's output": job.hidden}
    for index, layer in enumerate(job.layers):
        unit, at = index + 1, f"of layer {index + 1}"
        ahead = _ahead(job, index)
        block = activations.block(layer, ahead)
        held = (always, before[index])

        mine = {"block inputs": job.hidden}
        gathering = moment(f"gathering the weights {at}", *held, state.gathering(unit), mine)
        found.gathering.append(gathering)
        parts = _segment_input(job, index), state.in_forward(unit), block.forward
        found.forward.append(moment(f"forward {at}", *held, *parts))

        run_again = index - _start(job, index)
        again, weights = _segment(job, index), state.in_backward(unit, run_again)
        if run_again and (index + 1 == len(job.layers) or _begins(job, index + 1)):
            # The fullest of the runs again is that of the layer before this one, whose input it makes.
            outputs = {"attention outputs": saved[index]["attention outputs"]}
            parts_again = before[index - 1], outputs, _segment(job, index - 1), weights, dy
            name = f"making the input of layer {index + 1} again"
            run = activations.block(job.layers[index - 1], _ahead(job, index - 1)).forward
            found.making.append(moment(name, always, *parts_again, run))
        here = (*held, again)
        found.mlp.append(moment(f"backward {at}, MLP half", *here, weights, block.mlp_backward))
        found.attention.append(
            moment(f"backward {at}, attention half", *here, weights, block.attention_backward)
        )
        reduce = state.after_backward(unit, run_again)
        done = {**dy, "fetched ahead": ahead}
        found.reducing.append(moment(f"reducing the gradients {at}", *here, reduce, done))
    return found


def _always(job: Job, activations: Activations, state: Sharded) -> dict[str, int]:
    """From the first layer to the last and back: shards; ids, positions and labels; cosines and sines of the
    rotary embedding, made once for all layers."""
    tokens = job.rows * job.tokens
    rope = activations.rope_bytes * tokens
    return {**state.between_steps(), "batch": 24 * tokens, "rope": rope}


def _saved(job: Job, index: int) -> dict[str, int]:
    """What a layer keeps on the GPU from its forward until its backward."""
    layer = job.layers[index]
    outputs = layer.mode != "full" and not (layer.outputs_on_host and layer.mode == "selective")
    on_gpu = layer.keeps_input and not layer.input_on_host
    return {
        "block inputs": job.hidden if on_gpu or layer.mode == "none" else 0,
        "attention outputs": job.outputs if outputs else 0,
        "h1": job.hidden if layer.mode == "none" else 0,
    }


def _total(parts: list[dict[str, int]]) -> dict[str, int]:
    names = ("block inputs", "attention outputs", "h1")
    return {name: sum(part.get(name, 0) for part in parts) for name in names}


def _ahead(job: Job, index: int) -> int:
    """Bytes that the backward of a layer fetches for the one before it: the input of its segment, where
    that ends there, and early also what attention kept."""
    if index == 0:
        return 0
    layer = job.layers[index - 1]
    size = (
        job.hidden
        if _begins(job, index) and job.layers[_start(job, index - 1)].input_on_host
        else 0
    )
    if job.early_fetch and layer.outputs_on_host and layer.mode == "selective":
        size += job.outputs
    return size


def _begins(job: Job, index: int) -> bool:
    """Whether a segment does."""
    return job.layers[index].keeps_input


def _start(job: Job, index: int) -> int:
    """The layer with which the segment of ``index`` begins."""
    return max(i for i in range(index + 1) if job.layers[i].keeps_input)


def _segment(job: Job, index: int) -> dict[str, int]:
    """What was made again for the layers of the segment before this one, and what it was made from."""
    before = range(_start(job, index), index)
    layers = [job.layers[i] for i in before]
    outputs = sum(layer.mode == "full" and not layer.outputs_on_host for layer in layers)
    inputs = _segment_input(job, index)["block inputs"]
    return {
        "block inputs": inputs + job.hidden * max(0, len(before) - 1),
        "attention outputs": job.outputs * outputs,
    }


def _segment_input(job: Job, index: int) -> dict[str, int]:
    """Of a segment that began before this layer: its input stays until it ends, though it is on the
    host, too."""
    start = _start(job, index)
    there = start < index and job.layers[start].input_on_host
    return {"block inputs": job.hidden if there else 0}
