"""Read weights onto the device, one tensor after the other, so that at most one matrix is held twice."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from baton.compute.models.bfloat16 import BFLOAT16
from baton.compute.models.weights import WeightReader
from baton.compute.torch.kernels.expert_rows import RowProduct
from baton.compute.torch.kernels.fp8_linear import make_fp8_linear
from baton.compute.torch.kernels.layer_ops import TORCH_OPS, LayerOps
from baton.compute.torch.kernels.linear import Linear, make_linear
from baton.core.config import WeightsChoice


class TensorLoader:
    """Reads tensors from a model's files in one type, onto one device."""

    def __init__(
        self,
        reader: WeightReader,
        dtype: torch.dtype,
        device: torch.device,
        row_product: RowProduct | None = None,
        ops: LayerOps = TORCH_OPS,
        weights: WeightsChoice = "dense",
    ) -> None:
        """row_product: computes the experts of a few tokens from stacked weights. None: always expert by expert.

        ops: runs the operations between the products. weights: format of the layers' linear weights, dense or fp8.
        """
        self._reader = reader
        self.row_product = row_product
        self.ops = ops
        self._make = make_fp8_linear if weights == "fp8" else make_linear
        self.dtype = dtype
        self.device = device

    def tensor(self, name: str) -> Tensor:
        return _as_tensor(self._reader.read(name)).to(device=self.device, dtype=self.dtype).contiguous()

    def float32(self, name: str) -> Tensor:
        """Read a tensor in float32 whatever type the model computes in: a router's weights, for example."""
        return _as_tensor(self._reader.read(name)).to(device=self.device, dtype=torch.float32).contiguous()

    def linear(self, *names: str, biased: bool = False) -> Linear:
        """Load projections of the same input as one matrix. Their outputs follow each other."""
        weight = self.stacked(*(f"{name}.weight" for name in names))
        bias = self.stacked(*(f"{name}.bias" for name in names)) if biased else None
        return self.product(weight, bias)

    def product(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return the linear layer of a weight [outputs, inputs] of a decoder layer, in the format of this model."""
        return self._make(weight, bias)

    def stacked(self, *names: str) -> Tensor:
        """Read tensors and concatenate them along the first dimension."""
        parts = [self.tensor(name) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _as_tensor(stored: np.ndarray) -> Tensor:
    """Return a CPU tensor that shares the array's memory."""
    if stored.dtype == BFLOAT16:
        return torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(stored)
