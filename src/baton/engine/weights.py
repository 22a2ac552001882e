"""The port for weights: tensors by their Hugging Face name, read one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor

from baton.engine.card import ModelCard
from baton.engine.cut import Cut
from baton.engine.model_config import ModelConfig
from baton.engine.quantized import QuantizedMatrix
from baton.engine.weights_gguf import GGUFWeights
from baton.engine.weights_safetensors import SafetensorsWeights


class WeightReader(Protocol):
    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """Return one tensor, or a part of it, on the CPU, in the file's type (float32 where it was quantized)."""
        ...

    def read_quantized(self, name: str) -> QuantizedMatrix | None:
        """Return one matrix with the codes that the file stores; None where it stores floats, or another form."""
        ...


def open_weights(card: ModelCard, config: ModelConfig) -> WeightReader:
    """Open a resolved model's weights. Raises ModelError for a type that cannot be read."""
    if card.format == "gguf":
        return GGUFWeights(Path(card.path), config)
    return SafetensorsWeights(Path(card.path))
