"""The same block under other projects' context parallelism.

Shapes, weights, norm, rope and MLP arithmetic are this project's (models/decoder/functions.py); attention
is the peer's. Each is checkpointed in full, as their users run it at long context, and keeps its block
input on the device, which favours it.

    torch_cp:ROTATE:HEADS   torch.distributed.tensor.experimental.context_parallel around SDPA: ring
                            attention over head-tail balanced tokens. ROTATE allgather or alltoall; HEADS gqa
                            (SDPA's enable_gqa) or repeat (K and V repeated to all query heads, as
                            TorchTitan did). Kernel cudnn or sdpa (flash) by torch's own switch.
    deepspeed               DeepSpeed's DistributedAttention (Ulysses) around this project's kernel, and
                            its TiledMLP (ALST).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.blocks import Setting, make_model
from benchmarks.record import Record
from benchmarks.shapes import Loss, get_kernel
from benchmarks.timing import Case
from torchtitan_lc.attention.kernels import Kernel
from torchtitan_lc.memory.checkpointing import checkpoint_block

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa": SDPBackend.FLASH_ATTENTION,
    "cpu": SDPBackend.FLASH_ATTENTION,
}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [1, T, H, D], k and v [1, T, K, D] of this rank's tokens -> out [1, T, H, D]."""


class PeerBlock:
    """Shared by all peers: h [1, T, M] -> [1, T, M] with the peer's attention and MLP."""

    def __init__(self, setting: Setting, weights: dict[str, Tensor], kernel: str) -> None:
        self.setting, self.kernel_name = setting, kernel
        self.model = make_model(setting, weights)
        self.run = checkpoint_block("full")

    def attention(self) -> Attention:
        raise NotImplementedError

    def mlp(self, h: Tensor, block: Any) -> Tensor:
        m = block.feed_forward
        weights = (m.w1.weight, m.w2.weight, m.w3.weight)
        return self.model.functions.mlp_half(h, block.ffn_norm.weight, *weights)

    def positions(self, seq_len: int) -> Tensor:
        """[1, T] of this rank's tokens, contiguous."""
        peers, device = self.setting.peers, self.setting.device
        local = seq_len // peers.ranks
        return torch.arange(peers.rank * local, (peers.rank + 1) * local, device=device).view(1, -1)

    def around(self, stack: ExitStack, angles: Tensor) -> None:
        """Enters what the peer's attention needs around forward and backward."""

    def at(self, seq_len: int, h: Tensor, result: Record) -> Case:
        attend = self.attention()
        angles = self.model.functions.rope.cos_sin(self.positions(seq_len))

        def block_of(block: Any) -> Callable[[Tensor], Tensor]:
            f, a = self.model.functions, block.attention

            def halves(h: Tensor) -> Tensor:
                x = f.norm(h, block.attention_norm.weight)
                q = f.query(x, angles, a.wq.weight)
                k, v = f.key_value(x, angles, a.wk.weight, a.wv.weight)
                h = h + f.output(attend(q, k, v), a.wo.weight)
                return self.mlp(h, block)

            return halves

        def step() -> None:
            with ExitStack() as stack:
                self.around(stack, angles)
                x = h * 1
                for block in self.model.blocks:
                    x = self.run(block_of(block), x)
                Loss.apply(x).backward()

        def clean() -> None:
            self.model.zero_grad(set_to_none=True)
            h.grad = None

        def between() -> None:
            h.grad = None

        return Case(result, step, clean, between, unit=h.numel() * 2)


class TorchContextParallel(PeerBlock):
    def __init__(
        self, setting: Setting, weights: dict[str, Tensor], kernel: str, rotate: str, heads: str
    ) -> None:
        super().__init__(setting, weights, kernel)
        if kernel not in BACKENDS:
            raise ValueError(f"torch's SDPA has no {kernel}: use {', '.join(BACKENDS)}")
        self.rotate, self.repeat = rotate, heads == "repeat"
        self.mesh = init_device_mesh(setting.device.type, (setting.peers.ranks,))

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

    def positions(self, seq_len: int) -> Tensor:
        """Of the whole row: context_parallel cuts them in place, in its own order."""
        return torch.arange(seq_len, device=self.setting.device).view(1, -1)

    def around(self, stack: ExitStack, angles: Tensor) -> None:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        set_rotate_method(self.rotate)
        stack.enter_context(context_parallel(self.mesh, buffers=[angles], buffer_seq_dims=[1]))


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

    def __init__(self, setting: Setting, weights: dict[str, Tensor], kernel: str) -> None:
        super().__init__(setting, weights, kernel)
        comm = importlib.import_module("deepspeed.comm")
        alst = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
        layer = importlib.import_module("deepspeed.sequence.layer")
        self.tiled_mlp, self.distributed = alst.TiledMLP, layer.DistributedAttention
        backend = "nccl" if setting.device.type == "cuda" else "gloo"
        comm.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
        self.kernel = get_kernel(kernel, setting.device, setting.dtype, setting.args.head_dim)
        self.kernel_name = self.kernel.name

    def attention(self) -> Attention:
        class Local(nn.Module):
            def forward(module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: N805
                return _KernelAttention.apply(self.kernel, q, k, v)

        spread = self.distributed(Local(), dist.group.WORLD, scatter_idx=2, gather_idx=1)
        return lambda q, k, v: spread(q, k, v, 0)

    def mlp(self, h: Tensor, block: Any) -> Tensor:
        def fn(block: Any, h: Tensor) -> Tensor:
            return PeerBlock.mlp(self, h, block)

        m = block.feed_forward
        weights = [block.ffn_norm.weight, m.w1.weight, m.w2.weight, m.w3.weight]
        shards = -(-h.shape[1] // h.shape[2])  # as its documentation has it
        return self.tiled_mlp.apply(fn, block, h, shards, weights)


def make_peer(name: str, kernel: str, setting: Setting, weights: dict[str, Tensor]) -> PeerBlock:
    """Raises ValueError for a name that is no peer."""
    kind, *options = name.split(":")
    if kind == "torch_cp" and len(options) == 2:
        return TorchContextParallel(setting, weights, kernel, *options)
    if kind == "deepspeed" and not options:
        return DeepSpeedUlysses(setting, weights, kernel)
    raise ValueError(f"peer {name!r} is none of torch_cp:ROTATE:HEADS, deepspeed")
