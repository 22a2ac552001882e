"""Quantized weights (4 and 8 bits) of the native engine: a byte per code, a scale per row or per group of 32 inputs.

A weight is scale * (code - zero) + minimum. Weights that a GGUF file stores as Q8_0, Q4_0, Q4_1 or Q4_K keep their
codes. Other types, and float weights, are rounded to 8 bits.
Source: ggml's block formats (ggml-common.h), as the `gguf` package dequantizes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType

from baton.compute.models.dtype import WeightKind

ZERO_CODES: dict[WeightKind, int] = {"int8": 128, "q8": 128, "q4": 8, "q4m": 0}
"""The code that stands for zero."""
GROUP_INPUTS = 32
K_INPUTS = 256
"""The inputs of a Q4_K super-block: eight groups."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """One quantized matrix [rows, inputs]."""

    kind: WeightKind
    codes: np.ndarray  # [rows, inputs] uint8
    scales: np.ndarray  # int8: [rows] float32; else [rows, inputs / 32] float16
    minimums: np.ndarray | None = None  # q4m: [rows, inputs / 32] float16

    def dense(self) -> np.ndarray:
        """Return the weights that the codes stand for: [rows, inputs], float32. The reference of the native kernels."""
        codes = self.codes.astype(np.float32) - ZERO_CODES[self.kind]
        if self.kind == "int8":
            return codes * self.scales[:, None]
        groups = codes.reshape(len(codes), -1, GROUP_INPUTS) * self.scales.astype(np.float32)[:, :, None]
        if self.minimums is not None:
            groups += self.minimums.astype(np.float32)[:, :, None]
        return groups.reshape(codes.shape)

    def rows_in_order(self, order: np.ndarray) -> QuantizedMatrix:
        """Return the matrix with its rows in this order of indices."""
        minimums = None if self.minimums is None else self.minimums[order]
        return QuantizedMatrix(self.kind, self.codes[order], self.scales[order], minimums)


def quantize_rows(weight: np.ndarray) -> QuantizedMatrix:
    """Round float32 weights [rows, inputs] to 8 bits with one scale per row."""
    scales = np.abs(weight).max(1) / 127.0
    return QuantizedMatrix("int8", _codes(weight, scales[:, None]), scales)


def quantize_groups(weight: np.ndarray) -> QuantizedMatrix:
    """Round float32 weights [rows, inputs] to 8 bits with one scale per group of 32 inputs, as Q8_0 does."""
    groups = weight.reshape(len(weight), -1, GROUP_INPUTS)
    scales = (np.abs(groups).max(2) / 127.0).astype(np.float16)  # [rows, groups]
    codes = _codes(groups, scales.astype(np.float32)[:, :, None]).reshape(weight.shape)
    return QuantizedMatrix("q8", codes, scales)


def _codes(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    numbers = values / np.maximum(scales, np.float32(1e-30))
    np.rint(numbers, out=numbers)
    np.clip(numbers, -127, 127, out=numbers)
    numbers += 128
    return numbers.astype(np.uint8)


def stacked(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Concatenate the rows of matrices with the same inputs. Matrices of different kinds are converted to q8 first."""
    if len({part.kind for part in parts}) > 1:
        parts = [part if part.kind == "q8" else quantize_groups(part.dense()) for part in parts]
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return QuantizedMatrix(
        parts[0].kind,
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate(minimums) if minimums else None,
    )


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
