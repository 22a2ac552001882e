"""Weights from safetensors files, whole or in shards. Tensors are mapped and not copied.

Reading the headers touches no weights, so the server refuses a damaged checkpoint before it starts a worker.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from baton.compute.models.bfloat16 import BFLOAT16
from baton.compute.models.json_file import JSON_ERRORS, read_json
from baton.compute.models.quantized import QuantizedMatrix
from baton.compute.models.weights import TensorSlice, find_overlap
from baton.core.errors import ModelError

HEADER_BYTES_MAX = 32 << 20
DIMENSIONS_MAX = 8
INDEX_NAME = "model.safetensors.index.json"
NUMPY_TYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


class _TensorEntry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _ShardIndex(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """One tensor of a checkpoint: its file, its place in the file, its type and its shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


def read_checkpoint(folder: Path) -> dict[str, SafeTensor]:
    """Return every tensor of the checkpoint in a folder, by name.

    Raises ModelError for a missing shard, a truncated file, or an index that names a missing tensor.
    """
    index_path = folder / INDEX_NAME
    if not index_path.exists():
        return _merge([read_tensors(file) for file in _files(folder)])
    index = read_json(index_path, _ShardIndex)
    shards = sorted(set(index.weight_map.values()))
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        raise ModelError(
            f"{index_path} names {outside[0]!r}, which is not a file of its folder; download the model again"
        )
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ModelError(
            f"{index_path} names {len(shards)} shards, {len(missing)} of them missing: {', '.join(missing[:5])}; "
            "download the model again"
        )
    tensors = _merge([read_tensors(folder / shard) for shard in shards])
    absent = [
        name for name, shard in index.weight_map.items() if name not in tensors or tensors[name].file.name != shard
    ]
    if absent:
        raise ModelError(f"{index_path} places {absent[0]} in {index.weight_map[absent[0]]}, which does not hold it")
    return tensors


def _files(folder: Path) -> list[Path]:
    whole = folder / "model.safetensors"
    if whole.is_file():
        return [whole]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) > 1:
        raise ModelError(
            f"{folder} holds {len(files)} safetensors files and no {INDEX_NAME} that lists its shards; "
            "download the index as well"
        )
    return files


def _merge(parts: list[dict[str, SafeTensor]]) -> dict[str, SafeTensor]:
    return {name: tensor for part in parts for name, tensor in part.items()}


def read_tensors(path: Path) -> dict[str, SafeTensor]:
    """Return every tensor of one file, by name. Raises ModelError for a damaged or unreadable file."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else file_bytes
            if 8 + header_bytes > file_bytes or header_bytes > HEADER_BYTES_MAX:
                raise _damaged(path, f"its header claims {header_bytes} bytes, the file has {file_bytes}")
            header = msgspec.json.decode(file.read(header_bytes), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_TensorEntry) for name, raw in header.items()}
    except JSON_ERRORS as error:
        raise _damaged(path, f"its header is no valid JSON of tensors ({error})") from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    data_at = 8 + header_bytes
    tensors: dict[str, SafeTensor] = {}
    for name, entry in entries.items():
        _check_entry(path, name, entry, file_bytes - data_at)
        begin, end = entry.data_offsets
        tensors[name] = SafeTensor(path, entry.dtype, entry.shape, data_at + begin, end - begin)
    overlap = find_overlap((name, tensor.offset_bytes, tensor.size_bytes) for name, tensor in tensors.items())
    if overlap:
        raise _damaged(path, f"its tensors {overlap[0]} and {overlap[1]} overlap")
    return tensors


def _check_entry(path: Path, name: str, entry: _TensorEntry, data_bytes: int) -> None:
    begin, end = entry.data_offsets
    if not 0 <= begin <= end <= data_bytes:
        raise _damaged(path, f"tensor {name} ends at data byte {end}, the file has {data_bytes}")
    if entry.dtype not in NUMPY_TYPES:
        raise ModelError(f"{path}: tensor {name} has the type {entry.dtype}; Baton reads {', '.join(NUMPY_TYPES)}")
    if len(entry.shape) > DIMENSIONS_MAX or not all(0 <= dimension < 1 << 63 for dimension in entry.shape):
        raise _damaged(path, f"tensor {name} has {len(entry.shape)} dimensions, or one that is impossible")
    size = NUMPY_TYPES[entry.dtype].itemsize
    for dimension in entry.shape:
        size *= dimension
    if size != end - begin:
        raise _damaged(path, f"tensor {name} of shape {list(entry.shape)} needs {size} bytes and has {end - begin}")


def _damaged(path: Path, why: str) -> ModelError:
    return ModelError(f"{path} is damaged or cut off: {why}; download the file again")


class SafetensorsWeights:
    """Tensors of a checkpoint or of one file. Every file is mapped once, and stays mapped while this object exists."""

    def __init__(self, tensors: Mapping[str, SafeTensor]) -> None:
        self._tensors = tensors
        self._bytes = {file: _map_file(file) for file in {tensor.file for tensor in self._tensors.values()}}

    def read(self, name: str, part: TensorSlice | None = None) -> np.ndarray:
        """Return one tensor, or a part of it. Rows outside of the part are not read from the disk."""
        tensor = self._tensors[name]
        whole = self._view(tensor)
        return whole if part is None else whole[part.index]

    def read_quantized(self, name: str) -> QuantizedMatrix | None:
        return None

    def _view(self, tensor: SafeTensor) -> np.ndarray:
        data = self._bytes[tensor.file][tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
        # Tensors of old files may be unaligned: numpy then copies them to an aligned address.
        return np.require(data.view(NUMPY_TYPES[tensor.dtype]), requirements="A").reshape(tensor.shape)


def _map_file(file: Path) -> np.ndarray:
    """Map a file copy-on-write, because torch warns of arrays that it must not write."""
    try:
        with file.open("rb") as opened:
            return np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY), dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}; check its permissions, or download it again") from error
