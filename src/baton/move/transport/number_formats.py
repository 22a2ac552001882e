"""Convert KV numbers between data types, with the same bits as the engines produce. Arrays may have any strides.

Cells are arrays of bytes: [..., cell_bytes]. 8-bit numbers have a float32 scale behind them, as in
`compute/native/kv_dtype.h`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.decide.kv.layout import KVDtype

Cells = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

E4M3_LARGEST = np.float32(448.0)
INT8_LARGEST = np.float32(127.0)
TOO_LARGE = np.float32(1e38)
"""A head that contains a larger number or a NaN gets scale 0 and is stored as zeros."""
TOO_SMALL = np.float32(1e-35)
"""For a head whose largest number is smaller, the factor may overflow: it takes the slow path."""
E4M3_NORMAL = np.float32(2.0**-6)
"""Smallest normal number. Smaller numbers are multiples of 2^-9."""


def _e4m3_values() -> Floats:
    """Return each code's value times 2^-8. A code has the upper bits of a float16, but its exponent bias is 8 less."""
    codes = np.arange(256, dtype=np.uint16)
    halves = ((codes & 0x7F) << 7 | (codes & 0x80) << 8).astype(np.uint16)
    return halves.view(np.float16).astype(np.float32)


E4M3_VALUES = _e4m3_values()  # [256], each 2^-8 of the number


def decode(cells: Cells, dtype: KVDtype, out: Floats) -> None:
    """Decode cells [..., cell_bytes] into out [..., head_dim], which is contiguous."""
    match dtype:
        case "float32":
            np.copyto(out, cells.view(np.float32))
        case "float16":
            np.copyto(out, cells.view(np.float16))
        case "bfloat16":
            bits = out.view(np.uint32)
            np.copyto(bits, cells.view(np.uint16))
            np.left_shift(bits, 16, out=bits)
        case "int8":
            np.copyto(out, cells[..., :-4].view(np.int8))
            out *= _scales(cells)
        case "fp8":
            np.take(E4M3_VALUES, cells[..., :-4], out=out, mode="clip")
            out *= _scales(cells) * np.float32(256.0)
        case "uint8":
            raise AssertionError("bytes of the hash engine are no numbers")


def encode(numbers: Floats, dtype: KVDtype, cells: Cells) -> None:
    """Round numbers [..., head_dim] into cells [..., cell_bytes]. `numbers` is contiguous and is overwritten."""
    match dtype:
        case "float32":
            np.copyto(cells.view(np.float32), numbers)
        case "float16":
            np.copyto(cells.view(np.float16), numbers)
        case "bfloat16":
            np.copyto(cells.view(np.uint16), _to_bfloat16(numbers))
        case "int8":
            _scale(numbers, INT8_LARGEST, cells)
            np.copyto(cells[..., :-4].view(np.int8), np.rint(numbers, out=numbers), casting="unsafe")
        case "fp8":
            _scale(numbers, E4M3_LARGEST, cells)
            np.copyto(cells[..., :-4], _to_e4m3(numbers))
        case "uint8":
            raise AssertionError("bytes of the hash engine are no numbers")


def _scales(cells: Cells) -> Floats:
    """Return the scales behind the numbers: [..., 1]. They may be unaligned."""
    return np.ascontiguousarray(cells[..., -4:]).view(np.float32)


def _scale(numbers: Floats, largest: np.float32, cells: Cells) -> None:
    """Scale each head in place so that its largest number is `largest`, and write the scale behind the cells."""
    sizes = np.abs(numbers)
    most = np.maximum.reduce(sizes, axis=-1, keepdims=True)
    if not np.all((most > TOO_SMALL) & (most < TOO_LARGE)):
        most = np.fmax.reduce(sizes, axis=-1, keepdims=True, initial=np.float32(0.0))
        fits = most < TOO_LARGE
        numbers *= np.divide(largest, most, out=np.zeros_like(most), where=fits & (most > 0))
        np.copyto(numbers, np.float32(0.0), where=np.isnan(numbers))
        np.clip(numbers, -largest, largest, out=numbers)
        most = np.where(fits, most, np.float32(0.0))
    else:
        numbers *= largest / most
    np.copyto(cells[..., -4:], (most / largest).view(np.uint8))


def _to_bfloat16(numbers: Floats) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even: add half of the dropped bits' range, less one bit if the kept part is even."""
    bits = numbers.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    wrong = np.isnan(numbers)
    if wrong.any():
        rounded[wrong] = bits[wrong] >> 16 | 0x40
    return rounded.astype(np.uint16)


def _to_e4m3(numbers: Floats) -> npt.NDArray[np.uint8]:
    """Round numbers of at most 448 to codes, to nearest, ties to even. Zeros of both signs become code 0."""
    signs = np.signbit(numbers)
    size = np.abs(numbers, out=numbers)
    bits = size.view(np.uint32)
    codes = bits >> 20
    codes &= 1
    codes += 0x7FFFF - (120 << 23) & 0xFFFFFFFF
    codes += bits
    codes >>= 20
    small = np.flatnonzero(size < E4M3_NORMAL)
    codes.reshape(-1)[small] = np.rint(size.reshape(-1)[small] * np.float32(512.0))
    signs &= size > 0
    codes |= signs.astype(np.uint8) << 7
    return codes.astype(np.uint8)
