"""Products of rows with the weights of experts, a different expert for each row: what few tokens need.

No row waits for another, nothing is counted on the host (so a CUDA graph can hold it), and a row's sum is its own.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RowProduct(Protocol):
    def __call__(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Multiply every row with the weights of its experts.

        rows: [rows, inputs]. weights: [experts, outputs, inputs]. experts: [products], int64; product p reads row
        p // (products / rows). Returns [products, outputs].
        """
        ...


class TorchRowProduct:
    """Gathers the weights of every product: the oracle of the kernel, and slow."""

    def __call__(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        repeated = rows.repeat_interleave(len(experts) // len(rows), 0)
        return (weights[experts].float() @ repeated.float()[..., None])[..., 0].to(rows.dtype)
