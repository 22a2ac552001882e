"""Read the quantized weights of GGUF files. Q8_0, Q4_0, Q4_1 and Q4_K keep their codes.

Source: ggml's block formats (ggml-common.h), as the `gguf` package dequantizes them.
"""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType

from baton.compute.models.quantized import GROUP_INPUTS, QuantizedMatrix

K_INPUTS = 256
"""Inputs of a Q4_K super-block, which consists of eight groups."""


def from_gguf(raw: np.ndarray, type_: GGMLQuantizationType, shape: tuple[int, ...]) -> QuantizedMatrix | None:
    """Return the matrix of GGUF bytes with unchanged codes, or None for a type that is not supported."""
    match type_:
        case GGMLQuantizationType.Q8_0:
            blocks = raw.reshape(-1, 2 + GROUP_INPUTS)
            codes = blocks[:, 2:] ^ 128  # a signed byte plus 128
            return QuantizedMatrix("q8", codes.reshape(shape), _halves(blocks[:, :2], shape))
        case GGMLQuantizationType.Q4_0:
            blocks = raw.reshape(-1, 2 + GROUP_INPUTS // 2)
            return QuantizedMatrix("q4", _nibbles(blocks[:, 2:]).reshape(shape), _halves(blocks[:, :2], shape))
        case GGMLQuantizationType.Q4_1:
            blocks = raw.reshape(-1, 4 + GROUP_INPUTS // 2)
            scales, minimums = _halves(blocks[:, :2], shape), _halves(blocks[:, 2:4], shape)
            return QuantizedMatrix("q4m", _nibbles(blocks[:, 4:]).reshape(shape), scales, minimums)
        case GGMLQuantizationType.Q4_K:
            return _q4_k(raw.reshape(-1, 4 + 12 + K_INPUTS // 2), shape)
    return None


def _halves(data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the bytes as float16 numbers: [rows, groups]."""
    return np.ascontiguousarray(data).view(np.float16).reshape(shape[0], -1)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Unpack [groups, 16] bytes to [groups, 32] codes: the low halves are the first 16, the high halves the last 16."""
    return np.concatenate((packed & 15, packed >> 4), 1)


def _q4_k(blocks: np.ndarray, shape: tuple[int, ...]) -> QuantizedMatrix:
    """Unpack Q4_K blocks. Each of eight groups has a scale and a minimum of six bits, times the block's two float16.

    The products are rounded to float16.
    """
    factors = np.ascontiguousarray(blocks[:, :4]).view(np.float16).astype(np.float32)  # [blocks, 2]: scale, minimum
    low, high, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]  # [blocks, 4] each
    scales = np.concatenate((low & 63, (mixed & 15) | ((low >> 6) << 4)), 1)  # [blocks, 8]
    minimums = np.concatenate((high & 63, (mixed >> 4) | ((high >> 6) << 4)), 1)
    pairs = blocks[:, 16:].reshape(-1, 4, GROUP_INPUTS)  # 32 bytes hold two groups: low halves, then high halves
    codes = np.stack((pairs & 15, pairs >> 4), 2)  # [blocks, 4, 2, 32]
    return QuantizedMatrix(
        "q4m",
        codes.reshape(shape),
        (scales.astype(np.float32) * factors[:, :1]).astype(np.float16).reshape(shape[0], -1),
        (minimums.astype(np.float32) * -factors[:, 1:]).astype(np.float16).reshape(shape[0], -1),
    )
