"""Frequencies of rotary positions, with the scaling methods of all supported models. No torch."""

from __future__ import annotations

import math

import numpy as np

from baton.compute.models.model_config import Latent, ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Return the angle per position of each pair of dimensions: [rotary_dim / 2], float32.

    Powers are computed in float64 and rounded, so that they are the same on every machine.
    Sources: RoPE (arXiv 2104.09864), YaRN (arXiv 2309.00071), Llama 3 (the scaling published with Llama 3.1).
    """
    exponents = np.arange(0, config.rotary_dim, 2).astype(np.float32) / config.rotary_dim
    plain = 1.0 / np.power(config.rope_theta, exponents.astype(np.float64)).astype(np.float32)
    scaled = _scaled(plain, config)
    if config.rope.frequency_divisors:
        return scaled / np.array(config.rope.frequency_divisors, dtype=np.float32)
    return scaled


def _scaled(plain: np.ndarray, config: ModelConfig) -> np.ndarray:
    match config.rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / config.rope.factor
        case "llama3":
            return _llama3(plain, config.rope)
        case "yarn":
            return _yarn(plain, config)


def _llama3(plain: np.ndarray, rope: RopeScaling) -> np.ndarray:
    """Scale frequencies as Llama 3 does: keep high ones, divide low ones by the factor, and blend between."""
    turns = rope.original_context_tokens * plain / (2 * math.pi)  # full turns within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1.0 - blend) * plain / rope.factor + blend * plain


def _yarn(plain: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Scale frequencies by yarn.

    Dimensions with more than beta_fast turns in the original context stay. Those with fewer than beta_slow turns are
    divided by the factor. Between, the two are blended.
    """
    rope, half = config.rope, config.rotary_dim // 2

    def dimension(turns: float) -> float:
        wavelength = rope.original_context_tokens / (turns * 2 * math.pi)
        return config.rotary_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    span = high - low if high != low else 0.001
    stretch = np.clip((np.arange(half, dtype=np.float32) - low) / span, 0.0, 1.0)
    return plain / rope.factor * stretch + plain * (1.0 - stretch)


def rotary_order(rows: int, latent: Latent) -> np.ndarray:
    """Return the order [rows] of a projection's rows in which rotary dimension i pairs with i + rope_dim / 2.

    The rotary dimensions are the last rope_dim rows.
    """
    order = np.arange(rows)
    if not latent.rope_pairs:
        return order
    plain, turned = np.split(order, [rows - latent.rope_dim])
    return np.concatenate((plain, turned[0::2], turned[1::2]))
