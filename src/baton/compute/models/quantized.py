"""Quantized weights (4 and 8 bits) of the native engine: a byte per code, a scale per row or per group of 32 inputs.

A weight is scale * (code - zero) + minimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.compute.models.dtype import WeightKind

ZERO_CODES: dict[WeightKind, int] = {"int8": 128, "q8": 128, "q4": 8, "q4m": 0}
"""The `zero` of each kind of weights in scale * (code - zero) + minimum."""
GROUP_INPUTS = 32


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """One quantized matrix [rows, inputs]."""

    kind: WeightKind
    codes: np.ndarray  # [rows, inputs] uint8
    scales: np.ndarray  # int8: [rows] float32; else [rows, inputs / 32] float16
    minimums: np.ndarray | None = None  # q4m: [rows, inputs / 32] float16

    def dense(self) -> np.ndarray:
        """Return the weights that the codes stand for: [rows, inputs], float32. Reference of the native kernels."""
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
