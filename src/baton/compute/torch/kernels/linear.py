"""Linear layers. On a CPU, weights are packed once for oneDNN: 1.4 to 2.7 times as fast as matmul for 2-32 rows."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

PACK_ROWS_HINT = 16
"""The number of rows that oneDNN packs for. Measured best, or equal to the best, for 2 to 512 rows."""


class Linear(Protocol):
    def __call__(self, rows: Tensor) -> Tensor:
        """Return the product of [rows, inputs] with the weight, and its bias added: [rows, outputs]."""
        ...


class DenseLinear:
    """Works on any device, in any type. The reference of `PackedLinear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight  # [outputs, inputs]
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self._weight, self._bias)


class PackedLinear:
    """Holds the weight only in oneDNN's blocked layout, so it needs no extra memory."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS_HINT)
        self._bias = bias
        self._compute = torch.ops.mkldnn._linear_pointwise

    def __call__(self, rows: Tensor) -> Tensor:
        return self._compute(rows, self._packed, self._bias, "none", [], "")


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return a linear layer: packed on a CPU if oneDNN supports the type, else dense."""
    packable = weight.dtype is torch.float32 or (
        weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    if weight.device.type == "cpu" and torch.backends.mkldnn.is_available() and packable:
        return PackedLinear(weight, bias)
    return DenseLinear(weight, bias)
