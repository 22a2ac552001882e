"""Read weights onto the device, one tensor after the other, so that at most one matrix is held twice."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from baton.compute.models.bfloat16 import BFLOAT16
from baton.compute.models.weights import WeightReader
from baton.compute.torch.kernels.expert_rows import RowProduct
from baton.compute.torch.kernels.layer_ops import TORCH_OPS, LayerOps
from baton.compute.torch.kernels.linear import Linear, make_linear


class TensorLoader:
    """Reads tensors from a model's files in one type, onto one device."""

    def __init__(
        self,
        reader: WeightReader,
        dtype: torch.dtype,
        device: torch.device,
        row_product: RowProduct | None = None,
        ops: LayerOps = TORCH_OPS,
    ) -> None:
        """row_product: computes the experts of a few tokens from stacked weights. None: always expert by expert.

        ops: runs the operations between the products.
        """
        self._reader = reader
        self.row_product = row_product
        self.ops = ops
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
        return make_linear(weight, bias)

    def stacked(self, *names: str) -> Tensor:
        """Read tensors and concatenate them along the first dimension."""
        parts = [self.tensor(name) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _as_tensor(stored: np.ndarray) -> Tensor:
    """Return a CPU tensor that shares the array's memory."""
    if stored.dtype == BFLOAT16:
        return torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(stored)
