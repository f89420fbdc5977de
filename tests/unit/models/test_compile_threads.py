"""Compiled functions in the thread that runs backward.

On a GPU autograd runs backward in a thread of its own, and since torch 2.12 each thread has settings of its own
for torch.compile. On a CPU backward runs in the thread that asks for it, so here that is another one.
"""

from __future__ import annotations

import threading

import pytest
import torch

from tests.tiny import FLAVORS
from torchtitan_lc.models.decoder.functions import Functions


def _in_another_thread(run: object) -> None:
    raised: list[BaseException] = []

    def guarded() -> None:
        try:
            run()  # type: ignore[operator]
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def _run(functions: Functions, shapes: int) -> None:
    """`output` of one head up to ``shapes`` heads, forward and backward."""
    for heads in range(1, shapes + 1):
        out = torch.ones(1, 2, heads, functions.head_dim, requires_grad=True)
        wo = torch.ones(8, heads * functions.head_dim)
        functions.gradients.output(out, wo).sum().backward()


def test_more_than_eight_shapes_are_compiled_in_the_thread_of_backward_too() -> None:
    functions = Functions(FLAVORS["gqa"])
    functions.compile("eager")
    counters = torch._dynamo.utils.counters
    counters.clear()
    _in_another_thread(lambda: _run(functions, 12))
    assert counters["stats"]["unique_graphs"] == 12


def test_a_function_that_would_run_uncompiled_is_an_error_in_the_thread_of_backward_too() -> None:
    functions = Functions(FLAVORS["gqa"])
    functions.compile("eager")
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        _in_another_thread(lambda: _run(functions, 70))
