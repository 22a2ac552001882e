"""Weights from safetensors files, whole or in shards, mapped into memory and not copied."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from baton.engine.cut import Cut
from baton.engine.quantized import QuantizedMatrix
from baton.engine.safetensors_file import read_checkpoint


class SafetensorsWeights:
    """A checkpoint whose headers were checked. Every shard is mapped once and stays so while this object lives."""

    def __init__(self, folder: Path) -> None:
        self._files = {name: tensor.file for name, tensor in read_checkpoint(folder).items()}
        self._open = {file: safe_open(file, framework="pt") for file in set(self._files.values())}

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """See `WeightReader.read`. Rows that a cut does not need are not read from the disk."""
        file = self._open[self._files[name]]
        return file.get_tensor(name) if cut is None else file.get_slice(name)[cut.index]

    def read_quantized(self, name: str) -> QuantizedMatrix | None:
        return None
