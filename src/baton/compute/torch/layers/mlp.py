"""The gated MLP of a layer. Source: GLU variants (arXiv 2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from baton.compute.torch.kernels.layer_ops import TORCH_OPS, LayerOps
from baton.compute.torch.kernels.linear import Linear
from baton.compute.torch.layers.tensor_loader import TensorLoader


class Mlp(Protocol):
    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute [tokens, hidden] to the same shape. A token's result does not depend on other tokens."""
        ...


@dataclass(frozen=True, slots=True)
class GatedMlp:
    gate_up: Linear  # to 2 * intermediate
    down: Linear
    ops: LayerOps = TORCH_OPS

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(self.ops.gate(self.gate_up(hidden)))


def load_mlp(loader: TensorLoader, gate: str, up: str, down: str, *, biased: bool = False) -> GatedMlp:
    return GatedMlp(loader.linear(gate, up, biased=biased), loader.linear(down, biased=biased), loader.ops)
