"""Weights of 4 and 8 bits as the native engine takes them: a byte per code, a scale per row or per run of 32 inputs.

A weight is scale * (code - zero) + minimum. What a GGUF file stores as Q8_0, Q4_0, Q4_1 or Q4_K keeps its codes; other
types, and float weights, are rounded to 8 bits.
Source: ggml's block formats (ggml-common.h), as the `gguf` package dequantizes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from baton.engine.dtype import WeightKind

ZERO_CODES: dict[WeightKind, int] = {"int8": 128, "q8": 128, "q4": 8, "q4m": 0}
RUN_INPUTS = 32
K_INPUTS = 256
"""Inputs of a Q4_K super-block: eight runs."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """One matrix, [rows, inputs]."""

    kind: WeightKind
    codes: Tensor  # [rows, inputs] uint8
    scales: Tensor  # int8: [rows] float32; else [rows, inputs / 32] float16
    minimums: Tensor | None = None  # q4m: [rows, inputs / 32] float16

    def dense(self) -> Tensor:
        """Return the weights that the codes stand for: [rows, inputs], float32. The oracle of the native kernels."""
        codes = self.codes.float() - ZERO_CODES[self.kind]
        if self.kind == "int8":
            return codes * self.scales[:, None]
        runs = codes.view(len(codes), -1, RUN_INPUTS) * self.scales.float()[:, :, None]
        if self.minimums is not None:
            runs = runs + self.minimums.float()[:, :, None]
        return runs.view(codes.shape)

    def rows_in_order(self, order: Tensor) -> QuantizedMatrix:
        minimums = None if self.minimums is None else self.minimums[order]
        return QuantizedMatrix(self.kind, self.codes[order], self.scales[order], minimums)


def quantize_rows(weight: Tensor) -> QuantizedMatrix:
    """Round float weights [rows, inputs] to 8 bits with one scale per row."""
    scales = weight.float().abs().amax(1) / 127.0
    return QuantizedMatrix("int8", _codes(weight, scales[:, None]), scales)


def quantize_runs(weight: Tensor) -> QuantizedMatrix:
    """Round float weights [rows, inputs] to 8 bits with one scale per run of 32 inputs, as Q8_0 does."""
    runs = weight.float().view(len(weight), -1, RUN_INPUTS)
    scales = (runs.abs().amax(2) / 127.0).half()  # [rows, runs]
    codes = _codes(runs, scales.float()[:, :, None]).view(weight.shape)
    return QuantizedMatrix("q8", codes, scales)


def _codes(values: Tensor, scales: Tensor) -> Tensor:
    numbers = (values.float() / scales.clamp_min(1e-30)).round().clamp(-127, 127)
    return (numbers + 128).to(torch.uint8)


def stacked(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Put matrices that read the same input on top of each other; those of different kinds become q8 first."""
    if len({part.kind for part in parts}) > 1:
        parts = [part if part.kind == "q8" else quantize_runs(part.dense()) for part in parts]
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return QuantizedMatrix(
        parts[0].kind,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minimums) if minimums else None,
    )


def from_gguf(raw: Tensor, type_: GGMLQuantizationType, shape: tuple[int, ...]) -> QuantizedMatrix | None:
    """Unpack a matrix of a GGUF file without changing a code. None for a type that has no such form here."""
    match type_:
        case GGMLQuantizationType.Q8_0:
            blocks = raw.view(-1, 2 + RUN_INPUTS)
            codes = blocks[:, 2:] ^ 128  # a signed byte plus 128
            return QuantizedMatrix("q8", codes.reshape(shape), _halves(blocks[:, :2], shape))
        case GGMLQuantizationType.Q4_0:
            blocks = raw.view(-1, 2 + RUN_INPUTS // 2)
            return QuantizedMatrix("q4", _nibbles(blocks[:, 2:]).view(shape), _halves(blocks[:, :2], shape))
        case GGMLQuantizationType.Q4_1:
            blocks = raw.view(-1, 4 + RUN_INPUTS // 2)
            scales, minimums = _halves(blocks[:, :2], shape), _halves(blocks[:, 2:4], shape)
            return QuantizedMatrix("q4m", _nibbles(blocks[:, 4:]).view(shape), scales, minimums)
        case GGMLQuantizationType.Q4_K:
            return _q4_k(raw.view(-1, 4 + 12 + K_INPUTS // 2), shape)
    return None


def _halves(data: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Read float16: [rows, runs]."""
    return data.contiguous().view(torch.float16).view(shape[0], -1)


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack [runs, 16] bytes to [runs, 32] codes: low halves are the first 16, high halves the last 16."""
    return torch.cat((packed & 15, packed >> 4), 1)


def _q4_k(blocks: Tensor, shape: tuple[int, ...]) -> QuantizedMatrix:
    """Eight runs share two float16; each run has a scale and a minimum of six bits. Products are rounded to float16."""
    factors = blocks[:, :4].contiguous().view(torch.float16).float()  # [blocks, 2]: of scales, of minimums
    low, high, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]  # [blocks, 4] each
    scales = torch.cat((low & 63, (mixed & 15) | ((low >> 6) << 4)), 1)  # [blocks, 8]
    minimums = torch.cat((high & 63, (mixed >> 4) | ((high >> 6) << 4)), 1)
    pairs = blocks[:, 16:].reshape(-1, 4, RUN_INPUTS)  # 32 bytes hold two runs: low halves, then high halves
    codes = torch.stack((pairs & 15, pairs >> 4), 2)  # [blocks, 4, 2, 32]
    return QuantizedMatrix(
        "q4m",
        codes.reshape(shape),
        (scales.float() * factors[:, :1]).half().view(shape[0], -1),
        (minimums.float() * -factors[:, 1:]).half().view(shape[0], -1),
    )
