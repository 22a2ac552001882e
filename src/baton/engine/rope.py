"""Rotary positions: frequencies under every scaling that a served model uses, and the angles made of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton.engine.model_config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Return the angle per position of each pair of dimensions: [rotary_dim / 2], float32.

    Sources: RoPE (arXiv 2104.09864), YaRN (arXiv 2309.00071), Llama 3 (the scaling published with Llama 3.1).
    """
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
    plain = 1.0 / (config.rope_theta**exponents)
    scaled = _scaled(plain, config)
    if config.rope.frequency_divisors:
        return scaled / torch.tensor(config.rope.frequency_divisors, dtype=torch.float32)
    return scaled


def _scaled(plain: Tensor, config: ModelConfig) -> Tensor:
    match config.rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / config.rope.factor
        case "llama3":
            return _llama3(plain, config.rope)
        case "yarn":
            return _yarn(plain, config)


def _llama3(plain: Tensor, rope: RopeScaling) -> Tensor:
    """Keep short wavelengths, stretch long ones, blend between."""
    turns = rope.original_context_tokens * plain / (2 * math.pi)  # full turns within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * plain / rope.factor + blend * plain


def _yarn(plain: Tensor, config: ModelConfig) -> Tensor:
    """Keep dimensions that turn more than beta_fast times in the original context, stretch those below beta_slow."""
    rope, half = config.rope, config.rotary_dim // 2

    def dimension(turns: float) -> float:
        wavelength = rope.original_context_tokens / (turns * 2 * math.pi)
        return config.rotary_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    span = high - low if high != low else 0.001
    stretch = ((torch.arange(half, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return plain / rope.factor * stretch + plain * (1.0 - stretch)


class Rotary:
    """Cosines and sines, made for the positions of a step: a table of a long context would cost more than it saves."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        half = inverse_frequencies(config)
        self._frequencies = torch.cat((half, half)).to(device)  # [rotary_dim]
        self._signs = torch.cat((-torch.ones_like(half), torch.ones_like(half))).to(device)
        self._factor = config.rope.attention_factor
        self._dtype = dtype

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and signed sine (minus in the first half), each [tokens, 1, rotary_dim]."""
        angles = (positions[:, None].float() * self._frequencies)[:, None]
        cos, sin = angles.cos() * self._factor, angles.sin() * (self._signs * self._factor)
        return cos.to(self._dtype), sin.to(self._dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries and keys [tokens, heads, rotary_dim] to their positions: i pairs with i + rotary_dim / 2."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * cos, swapped, sin)
