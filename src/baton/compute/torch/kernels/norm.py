"""Root-mean-square normalization of the last dimension."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale every vector of [..., size] to unit mean square, then by weight [size]. Source: arXiv 1910.07467."""
    return functional.rms_norm(rows, (rows.shape[-1],), weight, eps)
