"""Weights from a GGUF file, dequantized to float32 as the `gguf` package defines it.

The three simple types that small models mostly use are computed with torch, which uses all threads and is several
times faster; the result is the same to the last bit (a test holds it).
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from baton.core.errors import ModelError
from baton.engine.cut import Cut
from baton.engine.gguf_file import GGUFTensor, open_gguf
from baton.engine.gguf_names import GGUFName, gguf_name, split_kv_b
from baton.engine.model_config import ModelConfig
from baton.engine.quantized import QuantizedMatrix, from_gguf

BLOCK_ITEMS = 32
LOW_HALVES = 0x0F0F0F0F0F0F0F0F
PLAIN_TYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


class GGUFWeights:
    """Tensors of a GGUF file under their Hugging Face names, in Hugging Face's order of rows."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._file = open_gguf(path)
        self._bytes = np.frombuffer(self._file.data, dtype=np.uint8)
        heads = {"q_proj": config.heads, "k_proj": config.kv_heads}
        # llama.cpp pairs dimension 2i with 2i + 1 for this architecture only, and stores the rows so.
        self._interleaved = heads if config.architecture in ("llama", "mistral", "mixtral") else {}

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """See `WeightReader.read`. A cut is made of what was dequantized whole."""
        whole = self._read(name)
        return whole if cut is None else whole[cut.index].clone()

    def _read(self, name: str) -> Tensor:
        place = gguf_name(name)
        if place.tensor not in self._file.tensors:
            return self._joined_kv_b(place)
        tensor = _part(self._file.tensors[place.tensor], place.expert)
        weight = self._dequantized(tensor)
        module = name.split(".")[-2]
        if module not in self._interleaved:
            return weight
        rows = weight.view(self._interleaved[module], -1, 2, *tensor.shape[1:])  # [heads, head_dim / 2, 2, ...]
        return rows.transpose(1, 2).reshape(tensor.shape)

    def read_quantized(self, name: str) -> QuantizedMatrix | None:
        """See `WeightReader`. Rows are put in order whole, so no code changes."""
        place = gguf_name(name)
        if place.tensor not in self._file.tensors:
            return None
        tensor = _part(self._file.tensors[place.tensor], place.expert)
        if len(tensor.shape) != 2:
            return None
        data = self._bytes[tensor.offset : tensor.offset + tensor.size_bytes]
        matrix = from_gguf(torch.from_numpy(data.copy()), tensor.type, tensor.shape)
        module = name.split(".")[-2]
        if matrix is None or module not in self._interleaved:
            return matrix
        rows = torch.arange(tensor.shape[0]).view(self._interleaved[module], -1, 2)
        return matrix.rows_in_order(rows.transpose(1, 2).flatten())

    def _joined_kv_b(self, place: GGUFName) -> Tensor:
        """Put together what newer files split: [heads * (nope_dim + value_dim), kv_rank]."""
        keys, values = (self._dequantized(self._file.tensors[part]).float() for part in split_kv_b(place))
        return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)

    def _dequantized(self, tensor: GGUFTensor) -> Tensor:
        data = self._bytes[tensor.offset : tensor.offset + tensor.size_bytes]
        # A mapped file is read-only, and torch has no such tensors: the bytes are copied, the file is not kept.
        raw = torch.from_numpy(data.copy())
        if tensor.type in PLAIN_TYPES:
            return raw.view(PLAIN_TYPES[tensor.type]).view(tensor.shape)
        match tensor.type:
            case GGMLQuantizationType.Q8_0:
                return _q8_0(raw).view(tensor.shape)
            case GGMLQuantizationType.Q4_0:
                return _q4_0(raw).view(tensor.shape)
            case GGMLQuantizationType.Q4_1:
                return _q4_1(raw).view(tensor.shape)
        try:
            values = quants.dequantize(data.reshape(math.prod(tensor.shape[:-1]), -1), tensor.type)
        except NotImplementedError as error:
            raise ModelError(
                f"{self._file.path}: tensor {tensor.name} has type {tensor.type.name}, which `gguf` cannot read; "
                "use a file with F16, BF16, Q8_0, Q6_K, Q4_K, Q4_1 or Q4_0"
            ) from error
        return torch.from_numpy(values).view(tensor.shape)


def _part(tensor: GGUFTensor, expert: int | None) -> GGUFTensor:
    """Cut one expert out of a stack, or give a row vector its first dimension back."""
    if expert is not None:
        size_bytes = tensor.size_bytes // tensor.shape[0]
        offset = tensor.offset + expert * size_bytes
        return replace(tensor, shape=tensor.shape[1:], offset=offset, size_bytes=size_bytes)
    if tensor.name.endswith("ffn_gate_inp_shexp.weight"):
        return replace(tensor, shape=(1, *tensor.shape))
    return tensor


def _q8_0(raw: Tensor) -> Tensor:
    """Scale (float16), 32 signed bytes."""
    blocks = raw.view(-1, 2 + BLOCK_ITEMS)
    scale = blocks[:, :2].contiguous().view(torch.float16).float()  # [blocks, 1]
    return blocks[:, 2:].contiguous().view(torch.int8).float().mul_(scale)


def _q4_0(raw: Tensor) -> Tensor:
    """Scale (float16), 32 numbers of four bits, 8 stands for zero."""
    blocks = raw.view(-1, 2 + BLOCK_ITEMS // 2)
    scale = blocks[:, :2].contiguous().view(torch.float16).float()
    return _nibbles(blocks[:, 2:]).sub_(8.0).mul_(scale)


def _q4_1(raw: Tensor) -> Tensor:
    """Scale and minimum (float16), 32 numbers of four bits."""
    blocks = raw.view(-1, 4 + BLOCK_ITEMS // 2)
    scale, minimum = blocks[:, :4].contiguous().view(torch.float16).float().split(1, 1)  # [blocks, 1] each
    return _nibbles(blocks[:, 4:]).mul_(scale).add_(minimum)


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack [blocks, 16] bytes: low halves are the first 16 numbers, high halves the last 16. Returns float32.

    Eight bytes at a time, as one integer: twice as fast as byte by byte.
    """
    words = packed.contiguous().view(torch.int64)  # [blocks, 2]
    halves = torch.cat((words & LOW_HALVES, (words >> 4) & LOW_HALVES), 1)  # [blocks, 4]
    return halves.view(torch.uint8).float()
