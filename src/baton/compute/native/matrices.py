"""Read matrices for the native library, and keep them alive until the library has copied them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.compute.models.bfloat16 import to_bfloat16, to_float32
from baton.compute.models.dtype import Dtype
from baton.compute.models.quantized import GROUP_INPUTS, QuantizedMatrix, quantize_groups, quantize_rows, stacked
from baton.compute.models.weights import WeightReader
from baton.compute.native.library import WEIGHT_DTYPE_CODES, NativeMatrix
from baton.core.config import WeightsChoice


class MatrixReader:
    """Reads matrices in the form of their products: dense, with the codes of the file, or rounded to 8 bits."""

    def __init__(self, reader: WeightReader, dtype: Dtype, weights: WeightsChoice) -> None:
        self._reader = reader
        self._computed = {"float32": to_float32, "bfloat16": to_bfloat16}[dtype]
        self._weights = weights

    def float32(self, name: str) -> np.ndarray:
        return to_float32(self._reader.read(name))

    def dense(self, name: str) -> np.ndarray:
        """Read a matrix that is dense even if `weights` asks for quantized matrices."""
        return self._computed(self._reader.read(name))

    def matrix(self, names: list[str]) -> np.ndarray | QuantizedMatrix:
        """Read matrices with the same inputs, and concatenate their rows: [rows, inputs]."""
        parts = [f"{name}.weight" for name in names]
        if self._weights == "dense":
            return _joined([self.dense(part) for part in parts])
        if self._weights == "int8":
            return stacked([quantize_rows(_aligned(self._reader.read(part))) for part in parts])
        return stacked([self._stored(part) for part in parts])

    def _stored(self, name: str) -> QuantizedMatrix:
        kept = self._reader.read_quantized(name)
        return quantize_groups(_aligned(self._reader.read(name))) if kept is None else kept


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate the rows of matrices. A single matrix is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _aligned(stored: np.ndarray) -> np.ndarray:
    """Return weights as float32, with inputs padded by zeros to whole groups."""
    weight, missing = to_float32(stored), -stored.shape[1] % GROUP_INPUTS
    return np.pad(weight, ((0, 0), (0, missing))) if missing else weight


class HeldArrays:
    """Keeps arrays alive while the library has pointers to them."""

    def __init__(self) -> None:
        self._alive: list[np.ndarray] = []

    def matrix(self, found: np.ndarray | QuantizedMatrix, bias: np.ndarray | None = None) -> NativeMatrix:
        """Return pointers to a matrix [rows, inputs] and its bias [rows], float32."""
        quantized = found if isinstance(found, QuantizedMatrix) else None
        weight = found.codes if isinstance(found, QuantizedMatrix) else found
        minimums = None if quantized is None else quantized.minimums
        return NativeMatrix(
            data=self.address(weight),
            bias=None if bias is None else self.address(bias),
            rows=len(weight),
            inputs=weight.shape[1],
            dtype=WEIGHT_DTYPE_CODES["dense" if quantized is None else quantized.kind],
            scales=None if quantized is None else self.address(quantized.scales),
            minimums=None if minimums is None else self.address(minimums),
        )

    def address(self, array: np.ndarray) -> int:
        """Return the address of an array's numbers in contiguous memory."""
        kept = np.ascontiguousarray(array)
        self._alive.append(kept)
        return kept.ctypes.data

    def release(self) -> None:
        """Drop all arrays. Call this when the library has copied them."""
        self._alive.clear()
