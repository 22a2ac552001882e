"""Read weights onto the device, one tensor after the other: no more than one matrix is held twice."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from baton.compute.models.stored import BFLOAT16
from baton.compute.models.weights import WeightReader
from baton.compute.torch.kernels.expert_rows import RowProduct
from baton.compute.torch.kernels.linear import Linear, make_linear


class Loader:
    """Where weights come from, in what type they are computed, and on what device."""

    def __init__(
        self, reader: WeightReader, dtype: torch.dtype, device: torch.device, row_product: RowProduct | None = None
    ) -> None:
        """row_product: what few tokens' experts are computed with, stacked. None: expert by expert, always."""
        self._reader = reader
        self.row_product = row_product
        self.dtype = dtype
        self.device = device

    def tensor(self, name: str) -> Tensor:
        return _as_tensor(self._reader.read(name)).to(device=self.device, dtype=self.dtype).contiguous()

    def exact(self, name: str) -> Tensor:
        """Read a small tensor that decides something, in float32 whatever the model computes in."""
        return _as_tensor(self._reader.read(name)).to(device=self.device, dtype=torch.float32).contiguous()

    def linear(self, *names: str, biased: bool = False) -> Linear:
        """Load projections that read the same input as one matrix, their outputs one after the other."""
        weight = self.stacked(*(f"{name}.weight" for name in names))
        bias = self.stacked(*(f"{name}.bias" for name in names)) if biased else None
        return make_linear(weight, bias)

    def stacked(self, *names: str) -> Tensor:
        """Read tensors and put them one after the other."""
        parts = [self.tensor(name) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _as_tensor(stored: np.ndarray) -> Tensor:
    """See an array as a tensor on the CPU. Nothing is copied."""
    if stored.dtype == BFLOAT16:
        return torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(stored)
