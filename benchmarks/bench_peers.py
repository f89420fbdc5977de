"""The same block on the same GPUs under this project, the published schedule and other projects.

    torchrun --nproc_per_node 2 -m benchmarks.bench_peers --name peers_8b_2xh200 --ranks 2 \
        --seq_lens 128K 256K --strategies upipe:4 ulysses --kernels fa4 --offload on --compile on \
        --hold_normed_input --overlap_exchange --early_fetch --published_kernels fa4 \
        --peers torch_cp:allgather:gqa:selective deepspeed --peer_kernels fa4

peers.py says what each peer is and what is the same for all. Peers are compiled where --compile has "on", the
published schedule never; --offload is for this project's cases. --peer_kernels: for torch_cp cudnn, sdpa, fa4
(torch 2.11 or newer), for deepspeed any of this project's; a pair that does not exist, or a package that is not
installed, is recorded with the reason. A peer is compiled anew for each length: with --skip_memory and several
lengths a timed step compiles, and the record says so.

DeepSpeed (0.19.8 was tried) needs no build on a GPU: its wheel, made with DS_BUILD_OPS=0, and the packages
einops, hjson, msgpack, psutil and pydantic. On a CPU it compiles an extension unless DS_ACCELERATOR=cuda.

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
from benchmarks.peers import make_peer, mode_of

__all__ = ["table"]

PEERS = ("torch_cp:allgather:gqa:full", "torch_cp:allgather:gqa:selective", "deepspeed")


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
    compile = "on" in args.compile
    for name, kernel in product(args.peers, args.peer_kernels):
        labels = {"kind": "peer", "strategy": name, "mode": mode_of(name), "kernel": kernel}
        labels |= {"offload": False, "compile": compile}
        contending.append((labels, partial(make_peer, name, kernel, setting, weights, compile)))
    run(args, setting, contending, "bench_peers")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
