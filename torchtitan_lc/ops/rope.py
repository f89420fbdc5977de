"""Rotary position embedding (Su et al., arXiv 2104.09864) from integer positions.

There is no table: angles are made from the positions that travel beside the tokens, so nothing has to be
sized for the longest row, sharded with it, or rebuilt after meta-device initialisation, and no mixed
precision policy can round it. Pairing is Hugging Face's half rotation (i with i + D/2), so loading
their weights is renaming only.

Angles are exact at any length used here: position * frequency is taken in fp64 as turns, the whole turns
are dropped, and only the rest is rounded to fp32. (In fp32 the product is wrong by up to 0.7 radians at
10M positions; in bf16 at a few hundred.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's frequency scaling ("rope_type": "llama3" of Hugging Face's config.json).

    Wavelengths longer than original_max_position_embeddings / low_freq_factor are stretched by
    factor, those shorter than original / high_freq_factor stay, those between are interpolated.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        ordered = self.high_freq_factor > self.low_freq_factor > 0
        if not (ordered and self.factor >= 1):  # so that NaN is refused too
            raise ValueError(
                "llama3 rope scaling needs factor >= 1 and high_freq_factor > low_freq_factor > 0, got "
                f"factor={self.factor}, low_freq_factor={self.low_freq_factor}, "
                f"high_freq_factor={self.high_freq_factor}"
            )

    def scale(self, inv_freq: Tensor) -> Tensor:
        turns_in_original = self.original_max_position_embeddings * inv_freq / (2 * math.pi)
        smooth = (turns_in_original - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        smooth = smooth.clamp(0, 1)
        return inv_freq * ((1 - smooth) / self.factor + smooth)


@dataclass
class Rope:
    """Rotation of query and key heads of size ``head_dim`` by their positions.

    theta: base of the frequencies. scaling: how frequencies are stretched for longer contexts.
    """

    head_dim: int
    theta: float
    scaling: Llama3Scaling | None = None
    _inv_freq: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    def inv_freq(self, device: torch.device | str = "cpu") -> Tensor:
        """[D / 2] fp64: radians per position."""
        device = torch.device(device)
        if device not in self._inv_freq:
            exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
            inv_freq = self.theta**-exponents
            if self.scaling is not None:
                inv_freq = self.scaling.scale(inv_freq)
            self._inv_freq[device] = inv_freq.to(device)
        return self._inv_freq[device]

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [B, t, n, D] by positions [B, t] (integers); the result has x's dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        turns = positions.unsqueeze(-1).double() * (self.inv_freq(x.device) / (2 * math.pi))
        angles = ((turns - turns.round()) * (2 * math.pi)).to(wide).unsqueeze(-2)  # [B, t, 1, D/2]
        cos, sin = angles.cos(), angles.sin()
        first, second = x.to(wide).chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return rotated.to(x.dtype)
