"""What the attention half of a block holds, in plain integers: its own answer to a planner.

    here             walks through the steps of
    half.py          half.py
    projecting.py    projecting.py, and the sums of weights' gradients in bound.py
    comm.py          comm.py
    ring.py          ring.py
    kernels.py       kernels/
    outputs.py       Outputs in ops/recompute.py

Each function names in its docstring the method that it follows, and writes down what that allocates and
frees. A change there belongs here too; tests/unit/plan/test_attention_buffers.py compares both on the meta
device.

The rank is the one that owns most heads. Letters: T tokens of a rank, S those of all ranks that exchange
heads, D head size, n query and m KV heads of the rank at a stage.
"""

from torchtitan_lc.attention.buffers.half import backward, forward
from torchtitan_lc.attention.buffers.outputs import Kept, await_backward, kept
from torchtitan_lc.attention.buffers.projecting import add_outputs
from torchtitan_lc.attention.buffers.sizes import Sizes, Tiles

__all__ = [
    "Kept",
    "Sizes",
    "Tiles",
    "add_outputs",
    "await_backward",
    "backward",
    "forward",
    "kept",
]
