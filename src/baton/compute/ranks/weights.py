"""A rank's part of the weights, read as those of the smaller model that it computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.compute.models.model_config import ModelConfig
from baton.compute.models.quantized import QuantizedMatrix
from baton.compute.models.weights import TensorSlice, WeightReader
from baton.compute.ranks.place import RankPlace
from baton.decide.kv.layout import Shard

LAYERS = "model.layers."
WIDTHS_OUT = ("gate_proj", "up_proj", "w1", "w3")
WIDTHS_IN = ("down_proj", "w2")


@dataclass(frozen=True, slots=True)
class RankWeights:
    """See `WeightReader`. Keeps no more than the rank computes with."""

    whole: WeightReader
    config: ModelConfig
    """Of the whole model."""
    place: RankPlace
    shard: Shard

    def read(self, name: str, part: TensorSlice | None = None) -> np.ndarray:
        """See `WeightReader.read`. `name` counts the layers of the stage from 0."""
        assert part is None, f"{name} is already a part"
        prefix, _, rest = name.removeprefix(LAYERS).partition(".")
        if not name.startswith(LAYERS):
            return self._read_end(name)
        name = f"{LAYERS}{int(prefix) + self.shard.layers.start}.{rest}"
        module, kind = name.split(".")[-2:]
        if module in ("o_proj", *WIDTHS_IN) and kind == "bias":
            bias = self.whole.read(name)  # every rank would add it to the sum: one of them has it
            return bias if self.place.column == 0 else np.zeros_like(bias)
        return self.whole.read(name, self._cut(name, module))

    def read_quantized(self, name: str) -> QuantizedMatrix | None:
        """See `WeightReader`. Ranks compute in floats."""
        return None

    def _read_end(self, name: str) -> np.ndarray:
        """Read the embedding or the output projection, filled up with zeros to what each rank has, or a norm."""
        if name == "model.norm.weight":
            return self.whole.read(name)
        part, tokens = self.place.vocab(self.config.vocab_tokens), self.config.vocab_tokens
        rows = self.whole.read(name, TensorSlice(0, part))
        missing = -(-tokens // self.place.tensor) - len(part)
        return np.pad(rows, ((0, missing), (0, 0))) if missing else rows

    def _cut(self, name: str, module: str) -> TensorSlice | None:
        """Find the rank's part of a tensor of a layer. None: it has all of it."""
        config, latent = self.config, self.config.latent
        each = config.heads // self.place.tensor
        queries = range(self.place.column * each, (self.place.column + 1) * each)
        match module:
            case "q_proj" | "q_b_proj":
                return TensorSlice(
                    0, _scaled(queries, config.head_dim if latent is None else latent.nope_dim + latent.rope_dim)
                )
            case "kv_b_proj":
                assert latent is not None, f"{name} belongs to latent attention"
                return TensorSlice(0, _scaled(queries, latent.nope_dim + latent.value_dim))
            case "k_proj" | "v_proj":
                return TensorSlice(0, _scaled(self.shard.heads, config.head_dim))
            case "o_proj":
                return TensorSlice(1, _scaled(queries, config.value_dim))
            case _ if module in WIDTHS_OUT:
                return TensorSlice(0, self.place.part(self._width(name)))
            case _ if module in WIDTHS_IN:
                return TensorSlice(1, self.place.part(self._width(name)))
            case _:
                return None

    def _width(self, name: str) -> int:
        experts = self.config.experts
        if experts is not None and ".experts." in name:
            return experts.intermediate
        if experts is not None and ".shared_expert" in name:
            return experts.shared_intermediate
        return self.config.intermediate


def _scaled(heads: range, dim: int) -> range:
    """Return the rows of some heads."""
    return range(heads.start * dim, heads.stop * dim)
