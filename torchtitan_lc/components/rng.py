"""The random generators of one process, as one picklable value.

torch on the CPU, torch on this rank's CUDA device, Python's ``random``, and NumPy's global
generator if somebody imported NumPy: what a resumed run must find as it was left.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def rng_state() -> dict[str, Any]:
    """A snapshot; it does not change when the generators move on."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = numpy.random.get_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what ``rng_state`` returned. A generator that only one of the two processes has (no
    GPU here, NumPy not imported there) is left as it is."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(state["numpy"])
