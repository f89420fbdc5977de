"""Rotary position embedding (Su et al., arXiv 2104.09864) from integer positions.

There is no table: cosines and sines are made from the positions that travel beside the tokens, once per
batch for all layers, so nothing has to be sized for the longest row, sharded with it, or rebuilt after
meta-device initialisation, and no mixed precision policy can round it. Pairing is Hugging Face's half
rotation (i with i + D/2), so loading their weights is renaming only.

Angles are exact at any length used here: position * frequency is taken in fp64 as turns, the whole turns
are dropped, and only the rest is rounded to fp32. (In fp32 the product is wrong by up to 0.7 radians at
10M positions; in bf16 at a few hundred.)

A scaling stretches the frequencies so that a model reaches further than it was first trained for. Their
numbers are those of transformers' rope functions for the same settings, which compute in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


def frequencies(theta: float, head_dim: int) -> Tensor:
    """[D / 2] fp64: radians per position, theta ** (-2i / D)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    return theta**-exponents


class Scaling(Protocol):
    """factor: how many times further than original_max_position_embeddings, the tokens of the rows
    that the model was first trained on, it is to reach. attention_scaling: what cos and sin are
    multiplied by, so that scores grow by its square."""

    @property
    def factor(self) -> float: ...
    @property
    def original_max_position_embeddings(self) -> int: ...
    @property
    def attention_scaling(self) -> float: ...
    def inv_freq(self, theta: float, head_dim: int) -> Tensor:
        """[D / 2] fp64: radians per position."""


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (arXiv 2306.15595): everything turns ``factor`` times slower."""

    factor: float
    original_max_position_embeddings: int
    attention_scaling = 1.0

    def __post_init__(self) -> None:
        _check("linear", self)

    def inv_freq(self, theta: float, head_dim: int) -> Tensor:
        return frequencies(theta, head_dim) / self.factor


@dataclass(frozen=True)
class NtkScaling:
    """NTK-aware scaling: theta grows by factor ** (D / (D - 2)), so that the slowest pair turns
    ``factor`` times slower and the fastest stays. The same as setting that theta."""

    factor: float
    original_max_position_embeddings: int
    attention_scaling = 1.0

    def __post_init__(self) -> None:
        _check("ntk", self)

    def theta(self, theta: float, head_dim: int) -> float:
        return theta * self.factor ** (head_dim / (head_dim - 2))

    def inv_freq(self, theta: float, head_dim: int) -> Tensor:
        return frequencies(self.theta(theta, head_dim), head_dim)


@dataclass(frozen=True)
class DynamicScaling:
    """transformers' "dynamic" NTK scaling, for rows of one length.

    theta grows by (factor * L / O - (factor - 1)) ** (D / (D - 2)), where O is
    original_max_position_embeddings and L = max(seq_len, O): not at all up to O, and by more than
    NtkScaling's from L = 2 O on. transformers takes the longest position of the batch at hand for L,
    so that the frequencies change while text is generated. Here L is the row's length, whatever
    documents lie in it: numbers are equal to theirs where a document fills its row.
    """

    factor: float
    original_max_position_embeddings: int
    seq_len: int = 0
    attention_scaling = 1.0

    def __post_init__(self) -> None:
        _check("dynamic", self)

    def inv_freq(self, theta: float, head_dim: int) -> Tensor:
        original = self.original_max_position_embeddings
        grown = self.factor * max(self.seq_len, original) / original - (self.factor - 1)
        return frequencies(theta * grown ** (head_dim / (head_dim - 2)), head_dim)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): pairs that turn often within the original context stay, those that turn
    less than once are slowed by ``factor``, those between are blended; scores become steeper.

    beta_fast, beta_slow: turns within original_max_position_embeddings from which a pair stays, and
    below which it is slowed by the whole factor. truncate: round that range outwards to whole pairs.
    attention_factor: multiplies cos and sin instead of the paper's 0.1 ln(factor) + 1, or of the ratio
    of two such terms where mscale and mscale_all_dim are both given (DeepSeek).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        _check("yarn", self)
        if not self.beta_fast > self.beta_slow > 0:  # so that NaN is refused too
            raise ValueError(
                "yarn rope scaling needs beta_fast > beta_slow > 0, got "
                f"beta_fast={self.beta_fast}, beta_slow={self.beta_slow}"
            )
        if not self.attention_scaling > 0:
            raise ValueError(
                "yarn rope scaling needs an attention factor above 0, got "
                f"attention_factor={self.attention_factor}, mscale={self.mscale}, "
                f"mscale_all_dim={self.mscale_all_dim}"
            )

    @property
    def attention_scaling(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor

        def term(mscale: float) -> float:
            return 0.1 * mscale * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return term(self.mscale) / term(self.mscale_all_dim)
        return term(1.0)

    def inv_freq(self, theta: float, head_dim: int) -> Tensor:
        def pair_that_turns(times: float) -> float:
            wavelength = self.original_max_position_embeddings / times
            return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low or 0.001  # transformers' way out of a range of no width
        slowed = (torch.arange(head_dim // 2, dtype=torch.float64) - low) / width
        slowed = slowed.clamp(0, 1)
        plain = frequencies(theta, head_dim)
        return plain * (1 - slowed) + plain / self.factor * slowed


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
    attention_scaling = 1.0

    def __post_init__(self) -> None:
        ordered = self.high_freq_factor > self.low_freq_factor > 0
        if not (ordered and self.factor >= 1):  # so that NaN is refused too
            raise ValueError(
                "llama3 rope scaling needs factor >= 1 and high_freq_factor > low_freq_factor > 0, got "
                f"factor={self.factor}, low_freq_factor={self.low_freq_factor}, "
                f"high_freq_factor={self.high_freq_factor}"
            )

    def inv_freq(self, theta: float, head_dim: int) -> Tensor:
        plain = frequencies(theta, head_dim)
        turns_in_original = self.original_max_position_embeddings * plain / (2 * math.pi)
        smooth = (turns_in_original - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        smooth = smooth.clamp(0, 1)
        return plain * ((1 - smooth) / self.factor + smooth)


def _check(name: str, scaling: Scaling) -> None:
    if not scaling.factor >= 1:  # so that NaN is refused too
        raise ValueError(f"{name} rope scaling needs factor >= 1, got factor={scaling.factor}")
    original = scaling.original_max_position_embeddings
    if not original >= 1:
        raise ValueError(
            f"{name} rope scaling needs original_max_position_embeddings >= 1, got {original}"
        )


@dataclass
class Rope:
    """Rotation of query and key heads of size ``head_dim`` by their positions.

    theta: base of the frequencies. scaling: how they are stretched for longer contexts.
    """

    head_dim: int
    theta: float
    scaling: Scaling | None = None
    attention_scaling: float = field(init=False)
    _inv_freq: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.attention_scaling = 1.0 if self.scaling is None else self.scaling.attention_scaling

    def inv_freq(self, device: torch.device | str = "cpu") -> Tensor:
        """[D / 2] fp64: radians per position."""
        device = torch.device(device)
        if device not in self._inv_freq:
            if self.scaling is None:
                inv_freq = frequencies(self.theta, self.head_dim)
            else:
                inv_freq = self.scaling.inv_freq(self.theta, self.head_dim)
            self._inv_freq[device] = inv_freq.to(device)
        return self._inv_freq[device]

    def cos_sin(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """positions [B, t] (integers) -> cosines, then sines, of their angles: [B, t, D] in ``dtype``."""
        turns = positions.unsqueeze(-1).double() * (self.inv_freq(positions.device) / (2 * math.pi))
        angles = ((turns - turns.round()) * (2 * math.pi)).to(dtype)
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * self.attention_scaling

    def rotate(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        """Rotate x [B, t, n, D] by `cos_sin`; the result has x's dtype."""
        cos, sin = cos_sin.unsqueeze(-2).chunk(2, dim=-1)  # [B, t, 1, D/2]
        first, second = x.to(cos_sin.dtype).chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return rotated.to(x.dtype)
