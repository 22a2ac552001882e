"""Weights as files store them, in numpy: float32, float16, and bfloat16 as its 16 bits, for which numpy has no type."""

from __future__ import annotations

import numpy as np

BFLOAT16 = np.dtype(np.uint16)
"""No weight is an unsigned integer, so what has this type is bfloat16: the upper half of a float32."""
PIECE_ITEMS = 1 << 16
"""Long arrays are converted in pieces that stay in a core's cache."""


def to_float32(stored: np.ndarray) -> np.ndarray:
    """Return numbers as float32, which holds all of them exactly (of float64, rounded). No copy where they are it."""
    if stored.dtype != BFLOAT16:
        return stored.astype(np.float32, copy=False)
    halves = np.zeros((*stored.shape, 2), dtype=np.uint16)  # little-endian: the upper half comes second
    halves[..., 1] = stored
    return halves.view(np.float32)[..., 0]


def to_bfloat16(stored: np.ndarray) -> np.ndarray:
    """Return numbers as the bits of bfloat16, rounded to the nearest, ties to even. No copy where they are it."""
    if stored.dtype == BFLOAT16:
        return stored
    source = np.ascontiguousarray(stored).reshape(-1)
    bits = np.empty(source.shape, dtype=BFLOAT16)
    for start in range(0, len(source), PIECE_ITEMS):
        piece = slice(start, start + PIECE_ITEMS)
        bits[piece] = _upper_halves(to_float32(source[piece]))
    return bits.reshape(stored.shape)


def _upper_halves(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded)
