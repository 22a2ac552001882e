"""Random weights for a folder with only config.json. Benchmarks need a model's shapes, not its texts."""

from __future__ import annotations

import math
import zlib

import numpy as np

from baton.compute.models.bfloat16 import BFLOAT16, to_bfloat16
from baton.compute.models.model_config import ModelConfig
from baton.compute.models.quantized import QuantizedMatrix
from baton.compute.models.tensor_names import expected_shapes
from baton.compute.models.weights import TensorSlice

POOL_ITEMS = (1 << 20) + 7
"""Number of random values, which all tensors repeat: drawing billions would take minutes. Odd, so that rows differ."""
STANDARD_DEVIATION = 0.02
"""Standard deviation of the values, usual for linear layers. Larger weights overflow in deep models."""


class DummyWeights:
    """Implements `WeightReader`. The same name gives the same tensor in every process."""

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = expected_shapes(config)
        drawn = np.random.default_rng(0).normal(0.0, STANDARD_DEVIATION, POOL_ITEMS)
        self._pool = to_bfloat16(drawn.astype(np.float32))

    def read(self, name: str, part: TensorSlice | None = None) -> np.ndarray:
        """Return random bfloat16 numbers; ones for the weights of norms, zeros for biases."""
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            whole = to_bfloat16(np.ones(shape, np.float32))
        elif name.endswith("bias"):
            whole = np.zeros(shape, BFLOAT16)
        else:
            first = zlib.crc32(name.encode()) % POOL_ITEMS
            whole = np.resize(np.roll(self._pool, -first), shape)
        return whole if part is None else whole[part.index]

    def read_quantized(self, name: str) -> QuantizedMatrix | None:
        return None


def dummy_weight_bytes(config: ModelConfig) -> int:
    """Return the size of the weights in bfloat16."""
    return sum(math.prod(shape) for shape in expected_shapes(config).values()) * BFLOAT16.itemsize
