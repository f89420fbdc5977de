"""The same block on the same GPUs under this project, the published schedule and other projects.

    torchrun --nproc_per_node 2 -m benchmarks.bench_peers --name peers_8b_2xh200 --ranks 2 \
        --seq_lens 128K 256K --strategies upipe:1 --kernels cudnn fa4 --offload on --compile on \
        --published_kernels cudnn fa4 \
        --peers torch_cp:allgather:gqa torch_cp:alltoall:gqa torch_cp:alltoall:repeat deepspeed

peers.py says what each peer is and what is the same for all. --peer_kernels: for torch_cp those of SDPA
(cudnn, sdpa), for deepspeed any of this project's; a pair that does not exist, or a package that is not
installed, is recorded with the reason. DeepSpeed needs no build: its wheel, made with DS_BUILD_OPS=0, and the
packages hjson, pydantic and einops are enough.

All cases take turns, as in bench_block.py, whose options these are otherwise. Tables give each other's
time over this project's, turn by turn: above 1 it is slower.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product

import torch.distributed as dist

from benchmarks.block_runs import add_arguments, contenders, make_setting, run, table
from benchmarks.blocks import make_weights
from benchmarks.peers import make_peer

__all__ = ["table"]

PEERS = ("torch_cp:allgather:gqa", "torch_cp:alltoall:gqa", "torch_cp:alltoall:repeat", "deepspeed")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--peers", nargs="*", default=PEERS)
    parser.add_argument("--peer_kernels", nargs="+", default=["cudnn"])
    args = parser.parse_args()
    setting = make_setting(args)
    weights = make_weights(setting)
    contending = contenders(args, setting, weights)
    for name, kernel in product(args.peers, args.peer_kernels):
        labels = {"kind": "peer", "strategy": name, "mode": "full", "kernel": kernel}
        labels |= {"offload": False, "compile": False}
        contending.append((labels, partial(make_peer, name, kernel, setting, weights)))
    run(args, setting, contending, "bench_peers")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
