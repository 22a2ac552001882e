"""Convert weights in numpy from and to bfloat16. numpy has no such type, so its 16 bits are stored as uint16."""

from __future__ import annotations

import numpy as np

BFLOAT16 = np.dtype(np.uint16)
"""Type of arrays of bfloat16 (the upper half of a float32). It is unambiguous: no weight is an unsigned integer."""
PIECE_ITEMS = 1 << 16
"""Long arrays are converted in pieces of this size, which fit into a core's cache."""


def to_float32(stored: np.ndarray) -> np.ndarray:
    """Return numbers as float32. The conversion is exact, except from float64. float32 is returned without a copy."""
    if stored.dtype != BFLOAT16:
        return stored.astype(np.float32, copy=False)
    halves = np.zeros((*stored.shape, 2), dtype=np.uint16)  # little-endian: the upper half comes second
    halves[..., 1] = stored
    return halves.view(np.float32)[..., 0]


def to_bfloat16(stored: np.ndarray) -> np.ndarray:
    """Return numbers as bits of bfloat16, rounded to nearest, ties to even. bfloat16 is returned without a copy."""
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
