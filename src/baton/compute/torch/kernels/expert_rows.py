"""Products of rows with the weights of experts, a different expert for each row. Fast for a few tokens.

The host does not count rows per expert, so a CUDA graph can contain the products. A row's result does not depend on
the other rows.
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
