"""The same block under other projects' context parallelism.

Shapes, weights, norm, rope and MLP arithmetic are this project's (models/decoder/functions.py), compiled or
not as for its own cases, one function at a time; attention is the peer's. A peer keeps its block input on the
device: no copies, and 1 B of its peak.

    torch_cp:ROTATE:HEADS:MODE  torch.distributed.tensor.experimental.context_parallel around SDPA: ring
                                attention over head-tail balanced tokens, merged in fp32. ROTATE allgather
                                (its default) or alltoall; HEADS gqa (SDPA's enable_gqa) or repeat (K and V
                                repeated to all query heads); MODE full or selective (torch's selective
                                checkpointing, which keeps attention's output). The MLP is not tiled. Kernel:
                                one of SDPA's, through torch's switches: cudnn, sdpa (FlashAttention 2), fa4.
    deepspeed                   DeepSpeed's DistributedAttention (Ulysses) around any kernel of this project,
                                and ALST's TiledMLP with the shards of its documentation. Checkpointed in
                                full, so that TiledMLP computes the MLP forward three times. Of its two
                                attention classes this one copies less: UlyssesSPAttentionHF reorders heads
                                and tokens for Hugging Face's functions. The norm and the residual sum are in
                                TiledMLP, too, which saves buffers. Without sp_stream, which hides exchanges.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from benchmarks.blocks import Setting, make_model
from benchmarks.record import Record
from benchmarks.shapes import Loss, get_kernel
from benchmarks.timing import Case
from torchtitan_lc.attention.kernels import Kernel
from torchtitan_lc.memory.checkpointing import checkpoint_block

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa": SDPBackend.FLASH_ATTENTION,
    "fa4": SDPBackend.FLASH_ATTENTION,
    "cpu": SDPBackend.FLASH_ATTENTION,
}
OPTIONS = (("allgather", "alltoall"), ("gqa", "repeat"), ("full", "selective"))

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [1, T, H, D], k and v [1, T, K, D] of this rank's tokens -> out [1, T, H, D]."""


class PeerBlock:
    """Shared by all peers: h [1, T, M] -> [1, T, M] with the peer's attention and MLP."""

    def __init__(
        self, setting: Setting, weights: dict[str, Tensor], kernel: str, compile: bool
    ) -> None:
        self.setting, self.kernel_name = setting, kernel
        self.model = make_model(setting, weights)
        if compile:
            self.model.functions.compile(setting.backend)
        self.run: Callable[..., Tensor] = checkpoint_block("full")

    def attention(self) -> Attention:
        raise NotImplementedError

    def mlp(self, h: Tensor, block: Any) -> Tensor:
        m = block.feed_forward
        weights = (m.w1.weight, m.w2.weight, m.w3.weight)
        return self.model.functions.mlp_half(h, block.ffn_norm.weight, *weights)

    def positions(self, row: Tensor) -> Tensor:
        """row [1, S], all positions -> [1, T], those of this rank's tokens."""
        peers = self.setting.peers
        return row.chunk(peers.ranks, dim=1)[peers.rank]

    def around(self, row: Tensor) -> AbstractContextManager[None]:
        """What the peer's attention needs around forward and backward of a row."""
        return nullcontext()

    def at(self, seq_len: int, h: Tensor, result: Record) -> Case:
        attend = self.attention()
        row = torch.arange(seq_len, device=self.setting.device).view(1, -1)
        angles = self.model.functions.rope.cos_sin(self.positions(row))
        result["kernel"] = self.kernel_name

        def step() -> None:
            with self.around(row):
                x = h * 1
                for block in self.model.blocks:
                    x = self.run(partial(self.block, block, attend, angles), x)
                loss = Loss.apply(x)
                del x  # nobody holds the output of a model's last block either
                loss.backward()

        def clean() -> None:
            self.model.zero_grad(set_to_none=True)
            h.grad = None

        def between() -> None:
            h.grad = None

        return Case(result, step, clean, between, unit=h.numel() * 2)

    def block(self, block: Any, attend: Attention, angles: Tensor, h: Tensor) -> Tensor:
        return self.mlp(self.attention_half(block, attend, angles, h), block)

    def attention_half(self, block: Any, attend: Attention, angles: Tensor, h: Tensor) -> Tensor:
        """Its own function, so that q, k and v are let go before the MLP."""
        f, a = self.model.functions, block.attention
        x = f.norm(h, block.attention_norm.weight)
        q = f.query(x, angles, a.wq.weight)
        k, v = f.key_value(x, angles, a.wk.weight, a.wv.weight)
        return h + f.output(attend(q, k, v), a.wo.weight)


class TorchContextParallel(PeerBlock):
    def __init__(
        self,
        setting: Setting,
        weights: dict[str, Tensor],
        kernel: str,
        compile: bool,
        rotate: str,
        heads: str,
        mode: str,
    ) -> None:
        super().__init__(setting, weights, kernel, compile)
        if kernel not in BACKENDS:
            raise ValueError(f"torch's SDPA has no {kernel}: use {', '.join(BACKENDS)}")
        self.rotate, self.repeat = rotate, heads == "repeat"
        self.mesh = init_device_mesh(setting.device.type, (setting.peers.ranks,))
        if mode == "selective":
            self.run = checkpoint_all_but_attention

    def attention(self) -> Attention:
        group = self.setting.args.n_heads // self.setting.args.n_kv_heads

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if self.repeat:
                k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(BACKENDS[self.kernel_name]):
                out = F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=not self.repeat
                )
            return out.transpose(1, 2)

        return attend

    def positions(self, row: Tensor) -> Tensor:
        with self.around(row):  # cuts it in place, in its own order
            return row.clone()

    @contextmanager
    def around(self, row: Tensor) -> Iterator[None]:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        set_rotate_method(self.rotate)
        flash = flash_attention_4() if self.kernel_name == "fa4" else nullcontext()
        with flash, context_parallel(self.mesh, buffers=[row], buffer_seq_dims=[1]):
            yield


def checkpoint_all_but_attention(fn: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """torch's selective checkpointing of what context_parallel can run."""
    aten = torch.ops.aten
    attention = {
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = op in attention
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return checkpoint(
        fn,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=partial(create_selective_checkpoint_contexts, policy),
    )


@contextmanager
def flash_attention_4() -> Iterator[None]:
    """flash-attn-4 in place of SDPA's FlashAttention 2, for this context alone: another kernel of a run may
    be the other."""
    from torch.nn.attention._fa4 import register_flash_attention_fa4

    handle = register_flash_attention_fa4("benchmarks.fa4_for_torch")
    try:
        yield
    finally:
        handle.remove()


class _KernelAttention(torch.autograd.Function):
    """This project's kernel with a gradient, as DeepSpeed's local attention."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.kernel, ctx.scale = kernel, q.shape[-1] ** -0.5
        out, lse = kernel.forward(q, k, v, causal=True, scale=ctx.scale)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        mask = {"causal": True, "scale": ctx.scale}
        return None, *ctx.kernel.backward(dout.contiguous(), q, k, v, out, lse, **mask)


class DeepSpeedUlysses(PeerBlock):
    """Raises ImportError where the package is not installed."""

    def __init__(
        self, setting: Setting, weights: dict[str, Tensor], kernel: str, compile: bool
    ) -> None:
        comm = importlib.import_module("deepspeed.comm")
        alst = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
        layer = importlib.import_module("deepspeed.sequence.layer")
        self.tiled_mlp, self.distributed = alst.TiledMLP, layer.DistributedAttention
        backend = "nccl" if setting.device.type == "cuda" else "gloo"
        comm.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
        self.kernel = get_kernel(kernel, setting.device, setting.dtype, setting.args.head_dim)
        super().__init__(setting, weights, self.kernel.name, compile)

    def attention(self) -> Attention:
        class Local(nn.Module):
            def forward(module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: N805
                return _KernelAttention.apply(self.kernel, q, k, v)

        spread = self.distributed(Local(), dist.group.WORLD, scatter_idx=2, gather_idx=1)
        return lambda q, k, v: spread(q, k, v, 0)

    def mlp(self, h: Tensor, block: Any) -> Tensor:
        def fn(block: Any, h: Tensor) -> Tensor:
            # A shard in backward is a leaf whose .grad is a part of a whole: torch.compile stumbles over it.
            return PeerBlock.mlp(self, h.view_as(h), block)

        m = block.feed_forward
        weights = [block.ffn_norm.weight, m.w1.weight, m.w2.weight, m.w3.weight]
        shards = -(-h.shape[1] // h.shape[2])  # as its documentation has it
        return self.tiled_mlp.apply(fn, block, h, shards, weights)


def mode_of(name: str) -> str:
    """How the peer ``name`` is checkpointed."""
    return "selective" if name.endswith(":selective") else "full"


def make_peer(
    name: str, kernel: str, setting: Setting, weights: dict[str, Tensor], compile: bool
) -> PeerBlock:
    """Raises ValueError for a name that is no peer."""
    kind, *options = name.split(":")
    known = [option in choices for option, choices in zip(options, OPTIONS, strict=False)]
    if kind == "torch_cp" and len(options) == len(OPTIONS) and all(known):
        return TorchContextParallel(setting, weights, kernel, compile, *options)
    if kind == "deepspeed" and not options:
        return DeepSpeedUlysses(setting, weights, kernel, compile)
    raise ValueError(
        f"peer {name!r} is none of deepspeed, torch_cp:ROTATE:HEADS:MODE with "
        + ", ".join("|".join(choices) for choices in OPTIONS)
    )
