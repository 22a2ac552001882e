"""Weights from safetensors files, whole or in shards, mapped into memory and not copied."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from baton.compute.models.cut import Cut
from baton.compute.models.quantized import QuantizedMatrix
from baton.compute.models.safetensors_file import SafeTensor, read_checkpoint
from baton.compute.models.stored import BFLOAT16
from baton.core.errors import ModelError

NUMPY_TYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


class SafetensorsWeights:
    """A checkpoint whose headers were checked. Every shard is mapped once and stays so while this object lives."""

    def __init__(self, folder: Path) -> None:
        self._tensors = read_checkpoint(folder)
        self._bytes = {file: _mapped(file) for file in {tensor.file for tensor in self._tensors.values()}}

    def read(self, name: str, cut: Cut | None = None) -> np.ndarray:
        """See `WeightReader.read`. Rows that a cut does not need are not read from the disk."""
        tensor = self._tensors[name]
        whole = self._view(tensor)
        return whole if cut is None else whole[cut.index]

    def read_quantized(self, name: str) -> QuantizedMatrix | None:
        return None

    def _view(self, tensor: SafeTensor) -> np.ndarray:
        data = self._bytes[tensor.file][tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
        # Old files begin their data anywhere: what lies at no address of its type is copied to one.
        return np.require(data.view(NUMPY_TYPES[tensor.dtype]), requirements="A").reshape(tensor.shape)


def _mapped(file: Path) -> np.ndarray:
    """Map a file for this process alone: the pages are the file's, and torch takes no array that it may not write."""
    try:
        with file.open("rb") as opened:
            return np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY), dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}; check its permissions, or download it again") from error
