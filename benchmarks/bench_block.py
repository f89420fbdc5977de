"""A transformer block, forward and backward: time, memory, and how close it comes to what its kernels allow.

    torchrun --nproc_per_node 2 -m benchmarks.bench_block --name block_8b_2xh200_256k --ranks 2 \
        --seq_lens 256K --strategies upipe:4 --kernels fa4 --offload on off --compile on \
        --published_kernels cudnn fa4 --hold_normed_input --overlap_exchange --early_fetch --skip_memory
    python -m benchmarks.bench_block --name block_memory_5m --ranks 8 --layers 2 --seq_lens 5M \
        --strategies upipe:1 --modes selective full --kernels stand-in --offload on \
        --send_kv_gradients --mlp_tokens 8192 --repeats 0

Under torchrun the ranks are real. Otherwise one process stands for rank 0 of --ranks on torch's fake process
group: real shapes, allocations and kernels, but no peers, so exchanges take no time. Without FSDP: the
block's weights are whole.

Cases are all combinations of strategies (upipe:1, upipe:4, ulysses, ring, local), modes, kernels, offload
and compile, and per --published_kernels the published schedule (blocks.py). They take turns; figures are
medians over --repeats, of the slowest rank. Per case and length:
- seconds of forward + backward, and how many times as long the published schedule took, turn by turn;
- fraction of the kernel ceiling (ceiling.py), on this rank;
- on a GPU the peak of allocated memory in B = tokens of the rank x width x 2 bytes, counted from the
  block's own input on: without the weights, with the gradient of its output.
Kernel "stand-in" allocates what a flash kernel does and computes nothing, for lengths whose attention
takes hours. A case that fails is recorded with its error.
"""

from __future__ import annotations

import argparse

import torch.distributed as dist

from benchmarks.block_runs import add_arguments, contenders, make_setting, run, table
from benchmarks.blocks import make_weights
from benchmarks.shapes import Loss, StandIn

__all__ = ["Loss", "StandIn", "table"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    args = parser.parse_args()
    setting = make_setting(args)
    run(args, setting, contenders(args, setting, make_weights(setting)), "bench_block")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
