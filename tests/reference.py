"""Llama in plain torch, one process, full logits, dense attention: what everything else must equal.

Shares no arithmetic with the package: rope, norm, attention and loss are written again here.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lc.models.decoder.args import DecoderArgs


def reference_logits(
    weights: dict[str, Tensor], args: DecoderArgs, tokens: Tensor, positions: Tensor
) -> Tensor:
    """weights: the model's parameters by name (whole). tokens, positions [B, S]. -> [B, S, V]."""
    h = weights["tok_embeddings.weight"][tokens]
    for i in range(args.n_layers):
        w = {
            n.removeprefix(f"layers.{i}."): t
            for n, t in weights.items()
            if n.startswith(f"layers.{i}.")
        }
        x = _norm(h, w["attention_norm.weight"], args.norm_eps)
        h = h + _attention(x, positions, args, w)
        x = _norm(h, w["ffn_norm.weight"], args.norm_eps)
        gate = F.silu(x @ w["feed_forward.w1.weight"].T)
        h = h + (gate * (x @ w["feed_forward.w3.weight"].T)) @ w["feed_forward.w2.weight"].T
    x = _norm(h, weights["head.norm.weight"], args.norm_eps)
    name = "tok_embeddings.weight" if args.tie_embeddings else "head.output.weight"
    return x @ weights[name].T


def reference_loss(
    weights: dict[str, Tensor], args: DecoderArgs, batch: dict[str, Tensor]
) -> Tensor:
    """Mean cross entropy over the live labels of ``batch``."""
    logits = reference_logits(weights, args, batch["tokens"], batch["positions"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def reference_step(
    model: nn.Module, args: DecoderArgs, batch: dict[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by parameter name of a plain (unsharded) model on whole rows, in fp64: what
    differs from it is the other side's rounding alone."""
    weights = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    loss = reference_loss(weights, args, batch)
    grads = torch.autograd.grad(loss, list(weights.values()))
    return loss.item(), dict(zip(weights, grads, strict=True))


def _norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * scale


def _attention(x: Tensor, positions: Tensor, args: DecoderArgs, w: dict[str, Tensor]) -> Tensor:
    B, S, _ = x.shape
    D = args.head_dim
    q = (x @ w["attention.wq.weight"].T).view(B, S, args.n_heads, D)
    k = (x @ w["attention.wk.weight"].T).view(B, S, args.n_kv_heads, D)
    v = (x @ w["attention.wv.weight"].T).view(B, S, args.n_kv_heads, D)
    q, k = _rotate(q, positions, args), _rotate(k, positions, args)
    group = args.n_heads // args.n_kv_heads
    document = (positions == 0).cumsum(dim=1)  # a document begins at position 0
    visible = document.unsqueeze(2) == document.unsqueeze(1)
    visible &= torch.ones(S, S, dtype=torch.bool).tril()
    heads = []
    for head in range(args.n_heads):
        scores = q[:, :, head] @ k[:, :, head // group].transpose(1, 2) / math.sqrt(D)
        scores = scores.masked_fill(~visible, float("-inf"))
        heads.append(scores.softmax(-1) @ v[:, :, head // group])
    return torch.cat(heads, dim=-1) @ w["attention.wo.weight"].T


def _rotate(x: Tensor, positions: Tensor, args: DecoderArgs) -> Tensor:
    """Rotation as multiplication of complex numbers (first half real, second half imaginary)."""
    D = args.head_dim
    freq = args.rope_theta ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angle = positions[:, :, None, None].double() * freq
    z = torch.complex(x[..., : D // 2].double(), x[..., D // 2 :].double())
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), dim=-1).to(x.dtype)
