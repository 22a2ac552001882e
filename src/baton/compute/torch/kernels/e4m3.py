"""Cells of KV in fp8: the e4m3 codes of a head, then its float32 scale. Same bits as `baton.move.number_formats`."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
TOO_LARGE = 1e38
"""A head that contains a larger number is stored as zeros."""
SCALE_BYTES = 4


def encode(numbers: Tensor) -> Tensor:
    """Round heads [..., head_dim] to cells [..., head_dim + 4], bytes. NaN becomes 0."""
    wide = numbers.float().nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf"))
    most = wide.abs().amax(-1, keepdim=True)
    most = torch.where(most < TOO_LARGE, most, 0.0)
    largest = torch.full_like(most, LARGEST)  # torch multiplies with the inverse of a divisor that is no tensor
    scaled = torch.where(most > 0, wide * (largest / most), 0.0).nan_to_num(nan=0.0).clamp(-LARGEST, LARGEST)
    codes = (scaled + 0.0).to(torch.float8_e4m3fn).view(torch.uint8)  # the sum turns -0 into 0
    return torch.cat((codes, (most / largest).view(torch.uint8)), -1)


def decode(cells: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers [..., head_dim] of cells [..., head_dim + 4] in a type of floats."""
    codes, scales = cells[..., :-SCALE_BYTES], cells[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (codes.contiguous().view(torch.float8_e4m3fn).float() * scales).to(dtype)
