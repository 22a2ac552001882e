"""The port for weights: tensors by their Hugging Face name, read one at a time. No torch: not every engine has it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from baton.compute.models.card import ModelCard
from baton.compute.models.config_gguf import read_config_gguf
from baton.compute.models.config_json import read_config_json
from baton.compute.models.cut import Cut
from baton.compute.models.gguf_file import open_gguf
from baton.compute.models.model_config import ModelConfig
from baton.compute.models.quantized import QuantizedMatrix
from baton.compute.models.weights_gguf import GGUFWeights
from baton.compute.models.weights_safetensors import SafetensorsWeights


class WeightReader(Protocol):
    def read(self, name: str, cut: Cut | None = None) -> np.ndarray:
        """Return one tensor, or a part of it, in the file's type (float32 where it was quantized).

        bfloat16 comes as its bits: see `baton.compute.models.stored`. The array may be a read-only view of the file.
        """
        ...

    def read_quantized(self, name: str) -> QuantizedMatrix | None:
        """Return one matrix with the codes that the file stores; None where it stores floats, or another form."""
        ...


def open_model(card: ModelCard) -> tuple[ModelConfig, WeightReader]:
    """Read a resolved model's configuration and open its weights: a GGUF file has both behind one long header.

    Raises ModelError for a file that cannot be read.
    """
    path = Path(card.path)
    if card.format == "gguf":
        file = open_gguf(path)
        config = read_config_gguf(file)
        return config, GGUFWeights(file, config)
    return read_config_json(path), SafetensorsWeights(path)
