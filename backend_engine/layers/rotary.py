"""Rotary position embedding: the frequency schemes of Hugging Face checkpoints and the layer that uses them.

A scheme is an object with ``frequencies``; model families choose one from config.json. The cosines and sines
are made once a step, from positions, so there is no table and no length limit here.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from backend_engine.ops.torch_ops import TorchOps
from backend_engine.quantization.quant_method import TensorOptions


def _base_frequencies(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


class RopeScaling(Protocol):
    """A frequency scheme."""

    def frequencies(self, theta: float, dim: int) -> tuple[Tensor, float]:
        """Inverse frequencies, float32 ``[dim / 2]``, and the factor on cosine and sine."""
        ...


@dataclass(frozen=True)
class NoScaling:
    """``theta ** (-2 i / dim)`` (RoFormer, Su et al., 2021)."""

    def frequencies(self, theta: float, dim: int) -> tuple[Tensor, float]:
        return _base_frequencies(theta, dim), 1.0


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: positions are divided by ``factor`` (Chen et al., 2023)."""

    factor: float

    def frequencies(self, theta: float, dim: int) -> tuple[Tensor, float]:
        return _base_frequencies(theta, dim) / self.factor, 1.0


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: wavelengths beyond ``original_max_positions / low_freq_factor`` are stretched by ``factor``, those
    below ``original_max_positions / high_freq_factor`` kept, and the band between blended linearly.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def frequencies(self, theta: float, dim: int) -> tuple[Tensor, float]:
        base = _base_frequencies(theta, dim)
        turns = self.original_max_positions * base / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return base * kept + base / self.factor * (1 - kept), 1.0


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., 2023): interpolate slow dimensions, keep fast ones, and scale cosine and sine.

    ``attention_factor``: the scale, already derived from ``factor``. ``truncate``: round the band's ends outwards.
    """

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def frequencies(self, theta: float, dim: int) -> tuple[Tensor, float]:
        base = _base_frequencies(theta, dim)
        # Dimension pair that turns `beta` times over the original length.
        low, high = (
            dim * math.log(self.original_max_positions / (beta * 2 * math.pi)) / (2 * math.log(theta))
            for beta in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low if high != low else 0.001
        interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        return base / self.factor * interpolated + base * (1 - interpolated), self.attention_factor


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al., 2024): each dimension pair has a factor of its own, ``short_factors`` for texts of up to
    ``original_max_positions`` tokens and ``long_factors`` for longer ones; cosine and sine are scaled.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    attention_factor: float

    def frequencies(self, theta: float, dim: int) -> tuple[Tensor, float]:
        return _base_frequencies(theta, dim) / torch.tensor(self.short_factors), self.attention_factor

    def long_frequencies(self, theta: float, dim: int) -> Tensor:
        """Inverse frequencies for texts of more than ``original_max_positions`` tokens."""
        return _base_frequencies(theta, dim) / torch.tensor(self.long_factors)


@dataclass(frozen=True)
class RopeDecl:
    """Rotary positions over the first ``dim`` elements of a head. ``is_interleaved``: the checkpoint rotates neighbours
    together instead of halves. ``exact_up_to``: the length of text from which the scheme is no longer what the model
    was given, ``None`` when it holds at any length.
    """

    theta: float
    scaling: RopeScaling
    dim: int
    is_interleaved: bool = False
    exact_up_to: int | None = None

    @property
    def switches_at(self) -> int | None:
        """Length of text beyond which other frequencies hold; ``None`` = the same for all."""
        return self.scaling.original_max_positions if isinstance(self.scaling, LongRopeScaling) else None


class Rotary(nn.Module):
    """Cosine and sine for a step's positions; one for each scheme of a model."""

    def __init__(self, decl: RopeDecl, ops: TorchOps, options: TensorOptions) -> None:
        super().__init__()
        frequencies, self._scale = decl.scaling.frequencies(decl.theta, decl.dim)
        self._frequencies = frequencies.to(options.device)
        self._long_frequencies: Tensor | None = None
        self._switches_at = decl.switches_at
        if isinstance(decl.scaling, LongRopeScaling):
            self._long_frequencies = decl.scaling.long_frequencies(decl.theta, decl.dim).to(options.device)
        self._dtype = options.dtype
        self._ops = ops

    def forward(self, positions: Tensor, text_lens: Tensor) -> tuple[Tensor, Tensor]:
        """``positions, text_lens [num_tokens]`` -> cos and signed sin, as ``Ops.apply_rope`` takes them."""
        frequencies = self._frequencies
        if self._long_frequencies is not None and self._switches_at is not None:
            frequencies = torch.where(text_lens.unsqueeze(-1) > self._switches_at, self._long_frequencies, frequencies)
        cos, sin = self._ops.rope_tables(positions, frequencies, self._scale)
        return cos.to(self._dtype), sin.to(self._dtype)
