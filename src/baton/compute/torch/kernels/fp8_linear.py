"""Linear layers in fp8 (e4m3): a scale per output of the weight and per row of the input, float32 sums.

Source: FP8 formats for deep learning (arXiv 2209.05433); scales by row and channel as in torch's `_scaled_mm`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.compute.models.dtype import FP8_WIDTH
from baton.compute.torch.kernels.linear import Linear, make_linear
from baton.core.errors import ModelError

LARGEST = 448.0
"""The largest number of e4m3."""
SCALE_MIN = 1e-30
"""Scale of a row of zeros."""
CAPABILITY_MIN = (8, 9)
"""First compute capability whose tensor cores multiply e4m3: Ada and Hopper."""
HEIGHT = 128
"""Rows of a weight that are quantized at a time, so that no float32 copy of the whole weight exists."""


def quantize_rows(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the e4m3 codes of [rows, inputs], in that shape, and their scales [rows, 1] in float32."""
    wide = numbers.float()
    scales = (wide.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(SCALE_MIN)
    return (wide / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def multiply(rows: Tensor, row_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """Return the product [rows, outputs] of codes [rows, inputs] and [outputs, inputs] on a CPU, in float32."""
    return (rows.float() @ weight.float().T) * row_scales * weight_scales


def multiply_on_device(rows: Tensor, row_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """Return the product as `multiply` does, by the tensor cores of a GPU: summed in float32, rounded to bfloat16."""
    return torch._scaled_mm(rows, weight.T, row_scales, weight_scales, out_dtype=torch.bfloat16)


class Fp8Linear:
    """Implements `Linear` with a weight in e4m3. Rounds each row of the input to e4m3 before the product."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [outputs, inputs] of any type of floats."""
        parts = [quantize_rows(part) for part in weight.split(HEIGHT)]
        self._codes = torch.cat([codes for codes, _ in parts])  # [outputs, inputs]
        self._scales = torch.cat([scales for _, scales in parts]).T.contiguous()  # [1, outputs]
        self._bias = bias
        self._multiply = multiply_on_device if weight.device.type == "cuda" else multiply

    def __call__(self, rows: Tensor) -> Tensor:
        codes, scales = quantize_rows(rows)
        product = self._multiply(codes, scales, self._codes, self._scales).to(rows.dtype)
        return product if self._bias is None else product + self._bias


def make_fp8_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return a linear layer in fp8, or in the type of the weight if tensor cores do not take its shape."""
    if any(size % FP8_WIDTH for size in weight.shape):
        return make_linear(weight, bias)
    return Fp8Linear(weight, bias)


def check_fp8(device: torch.device) -> None:
    """Raise ModelError if a device cannot multiply e4m3. A CPU can, slowly: it is the reference of the GPU."""
    if device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY_MIN:
        raise ModelError(
            f"weights = 'fp8' needs a GPU of compute capability {CAPABILITY_MIN[0]}.{CAPABILITY_MIN[1]} or later, and "
            f"{device} has {found[0]}.{found[1]}; use --weights dense"
        )
    try:
        try_product(device)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"weights = 'fp8' cannot be used: torch {torch.__version__} multiplies no e4m3 with scales by row on "
            f"{device}: {reason}; use --weights dense"
        ) from error


def try_product(device: torch.device) -> None:
    """Run the smallest product of a GPU. Raises what torch raises if it lacks the product for this device."""
    codes, scales = quantize_rows(torch.ones(FP8_WIDTH, FP8_WIDTH, device=device))
    multiply_on_device(codes, scales, codes, scales.T.contiguous()).sum().item()
