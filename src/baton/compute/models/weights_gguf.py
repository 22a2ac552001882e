"""Weights from a GGUF file, dequantized to float32 as the `gguf` package does.

The three types that small models use most are dequantized here, in pieces that fit into a core's cache. This is several
times faster than the package and gives the same bits (a test checks it).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from gguf import GGMLQuantizationType, quants

from baton.compute.models.bfloat16 import BFLOAT16, PIECE_ITEMS, to_float32
from baton.compute.models.gguf_file import GGUFFile, GGUFTensor
from baton.compute.models.gguf_names import GGUFName, gguf_name, split_kv_b
from baton.compute.models.model_config import ModelConfig
from baton.compute.models.quantized import QuantizedMatrix
from baton.compute.models.quantized_gguf import from_gguf
from baton.compute.models.weights import TensorSlice
from baton.core.errors import ModelError
from baton.move.cores import usable_cores

BLOCK_ITEMS = 32
LOW_HALVES = np.uint64(0x0F0F0F0F0F0F0F0F)
PLAIN_TYPES = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.BF16: BFLOAT16,
}


class GGUFWeights:
    """Tensors of a GGUF file under their Hugging Face names, in Hugging Face's order of rows."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file = file
        self._bytes = np.frombuffer(file.data, dtype=np.uint8)
        heads = {"q_proj": config.heads, "k_proj": config.kv_heads}
        # llama.cpp pairs rotary dimension 2i with 2i + 1 for these architectures, and stores the rows in that order.
        self._interleaved = heads if config.architecture in ("llama", "mistral", "mixtral") else {}

    def read(self, name: str, part: TensorSlice | None = None) -> np.ndarray:
        """Return one tensor, or a part of it. Even for a part, the whole tensor is dequantized."""
        whole = self._read(name)
        return whole if part is None else whole[part.index].copy()

    def _read(self, name: str) -> np.ndarray:
        place = gguf_name(name)
        if place.tensor not in self._file.tensors:
            return self._joined_kv_b(place)
        tensor = _part(self._file.tensors[place.tensor], place.expert)
        weight = self._dequantized(tensor)
        module = name.split(".")[-2]
        if module not in self._interleaved:
            return weight
        rows = weight.reshape(self._interleaved[module], -1, 2, *tensor.shape[1:])  # [heads, head_dim / 2, 2, ...]
        return rows.swapaxes(1, 2).reshape(tensor.shape)

    def read_quantized(self, name: str) -> QuantizedMatrix | None:
        """Return one matrix with its codes. Only the order of whole rows changes, so the codes stay the same."""
        place = gguf_name(name)
        if place.tensor not in self._file.tensors:
            return None
        tensor = _part(self._file.tensors[place.tensor], place.expert)
        if len(tensor.shape) != 2:
            return None
        data = self._bytes[tensor.offset : tensor.offset + tensor.size_bytes]
        matrix = from_gguf(data, tensor.type, tensor.shape)
        module = name.split(".")[-2]
        if matrix is None or module not in self._interleaved:
            return matrix
        rows = np.arange(tensor.shape[0]).reshape(self._interleaved[module], -1, 2)
        return matrix.rows_in_order(rows.swapaxes(1, 2).reshape(-1))

    def _joined_kv_b(self, place: GGUFName) -> np.ndarray:
        """Return kv_b of a file that splits it into two tensors: [heads * (nope_dim + value_dim), kv_rank]."""
        keys, values = (to_float32(self._dequantized(self._file.tensors[part])) for part in split_kv_b(place))
        return np.concatenate((keys.swapaxes(1, 2), values), 1).reshape(-1, keys.shape[1])

    def _dequantized(self, tensor: GGUFTensor) -> np.ndarray:
        data = self._bytes[tensor.offset : tensor.offset + tensor.size_bytes]
        if (
            tensor.type in PLAIN_TYPES
        ):  # a copy: torch warns of arrays that it must not write, and the file is mapped read-only
            return data.copy().view(PLAIN_TYPES[tensor.type]).reshape(tensor.shape)
        if tensor.type in SIMPLE_TYPES:
            block_bytes, unpack = SIMPLE_TYPES[tensor.type]
            return _in_pieces(data.reshape(-1, block_bytes), unpack).reshape(tensor.shape)
        try:
            values = quants.dequantize(data.reshape(math.prod(tensor.shape[:-1]), -1), tensor.type)
        except NotImplementedError as error:
            raise ModelError(
                f"{self._file.path}: tensor {tensor.name} has type {tensor.type.name}, which `gguf` cannot dequantize; "
                "use a file with F16, BF16, Q8_0, Q6_K, Q4_K, Q4_1 or Q4_0"
            ) from error
        return values.reshape(tensor.shape)


def _part(tensor: GGUFTensor, expert: int | None) -> GGUFTensor:
    """Return one expert's part of a stacked tensor. A row vector gets back its first dimension of 1."""
    if expert is not None:
        size_bytes = tensor.size_bytes // tensor.shape[0]
        offset = tensor.offset + expert * size_bytes
        return replace(tensor, shape=tensor.shape[1:], offset=offset, size_bytes=size_bytes)
    if tensor.name.endswith("ffn_gate_inp_shexp.weight"):
        return replace(tensor, shape=(1, *tensor.shape))
    return tensor


def _in_pieces(blocks: np.ndarray, unpack: Callable[[np.ndarray, np.ndarray], None]) -> np.ndarray:
    """Unpack [blocks, bytes of a block] to [blocks, 32] float32, on all cores that this process may use."""
    values = np.empty((len(blocks), BLOCK_ITEMS), dtype=np.float32)
    size, shares = PIECE_ITEMS // BLOCK_ITEMS, usable_cores()

    def unpack_share(share: int) -> None:
        for start in range(share * size, len(blocks), shares * size):
            unpack(blocks[start : start + size], values[start : start + size])

    with ThreadPoolExecutor(shares) as threads:
        deque(threads.map(unpack_share, range(shares)), maxlen=0)
    return values


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """Q8_0 block: a scale (float16), then 32 signed bytes."""
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _halves(blocks[:, :2])


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """Q4_0 block: a scale (float16), then 32 numbers of four bits; 8 stands for zero."""
    _nibbles(blocks[:, 2:], out)
    out -= 8.0
    out *= _halves(blocks[:, :2])


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """Q4_1 block: a scale and a minimum (float16), then 32 numbers of four bits."""
    _nibbles(blocks[:, 4:], out)
    out *= _halves(blocks[:, :2])
    out += _halves(blocks[:, 2:4])


SIMPLE_TYPES: dict[GGMLQuantizationType, tuple[int, Callable[[np.ndarray, np.ndarray], None]]] = {
    GGMLQuantizationType.Q8_0: (2 + BLOCK_ITEMS, _q8_0),
    GGMLQuantizationType.Q4_0: (2 + BLOCK_ITEMS // 2, _q4_0),
    GGMLQuantizationType.Q4_1: (4 + BLOCK_ITEMS // 2, _q4_1),
}
"""The bytes of a block, and the function that unpacks many blocks."""


def _halves(data: np.ndarray) -> np.ndarray:
    """Return the float16 of each block: [blocks, 1], float32."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    """Unpack [blocks, 16] bytes to [blocks, 32]: the low halves are the first 16 numbers, the high halves the last 16.

    Eight bytes are unpacked at a time, as one integer.
    """
    words = np.ascontiguousarray(packed).view(np.uint64)  # [blocks, 2]
    halves = np.concatenate((words & LOW_HALVES, (words >> np.uint64(4)) & LOW_HALVES), 1)  # [blocks, 4]
    out[:] = halves.view(np.uint8)
