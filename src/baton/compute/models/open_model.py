"""Open the files of a resolved model: its configuration, and a reader of its weights."""

from __future__ import annotations

from pathlib import Path

from baton.compute.models.card import ModelCard
from baton.compute.models.config_gguf import read_config_gguf
from baton.compute.models.config_json import read_config_json
from baton.compute.models.dummy_weights import DummyWeights
from baton.compute.models.gguf_file import open_gguf
from baton.compute.models.lora import AdaptedWeights, read_adapter
from baton.compute.models.model_config import ModelConfig
from baton.compute.models.safetensors_file import SafetensorsWeights, read_checkpoint
from baton.compute.models.weights import WeightReader


def read_config(card: ModelCard) -> ModelConfig:
    """Return the configuration of a resolved model. Raises ModelError for a file that cannot be read.

    A worker gets only the card, so it reads the configuration again.
    """
    path = Path(card.path)
    return read_config_gguf(open_gguf(path)) if card.format == "gguf" else read_config_json(path)


def open_model(card: ModelCard) -> tuple[ModelConfig, WeightReader]:
    """Return the configuration of a resolved model and a reader of its weights, with its adapter added.

    A GGUF file is opened once for both, because its header takes long to read.
    Raises ModelError for a file that cannot be read.
    """
    config, weights = _open_unadapted(card)
    if card.adapter:
        weights = AdaptedWeights(weights, read_adapter(Path(card.adapter), config))
    return config, weights


def _open_unadapted(card: ModelCard) -> tuple[ModelConfig, WeightReader]:
    path = Path(card.path)
    if card.format == "gguf":
        from baton.compute.models.weights_gguf import GGUFWeights  # loads `gguf`, which takes 0.1 s

        file = open_gguf(path)
        config = read_config_gguf(file)
        return config, GGUFWeights(file, config)
    config = read_config_json(path)
    return config, DummyWeights(config) if card.format == "dummy" else SafetensorsWeights(read_checkpoint(path))
