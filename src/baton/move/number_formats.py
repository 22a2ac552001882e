"""Convert KV numbers between data types, with the same bits as the engines produce. Arrays may have any strides.

Cells are arrays of bytes: [..., cell_bytes]. This is the definition of every format; where there is a compiler,
`move/recode.cpp` converts with the same bits. Formats with scales are described in `move/kv_formats.h`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.decide.kv.layout import GROUP_NUMBERS, KVDtype

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
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FP4_SMALLEST = np.float32(1e-30)
"""A head whose largest number is smaller is stored as zeros."""


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
        case "fp4":
            scales = cells[..., out.shape[-1] // 2 : -1]
            powers = _powers_of_two(cells[..., -1:].astype(np.int32) - 127)
            _decode_groups(cells, E4M3_VALUES[scales] * np.float32(256.0) * powers, GROUP_NUMBERS["fp4"], out)
        case "mxfp4":
            scales = _powers_of_two(cells[..., out.shape[-1] // 2 :].astype(np.int32) - 127)
            _decode_groups(cells, scales, GROUP_NUMBERS["mxfp4"], out)
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
        case "fp4":
            _encode_fp4(numbers, cells)
        case "mxfp4":
            _encode_mxfp4(numbers, cells)
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
        np.copyto(sizes, np.float32(0.0), where=np.isnan(sizes))  # `fmax` would return signaling NaN
        most = np.maximum.reduce(sizes, axis=-1, keepdims=True)
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


def _encode_mxfp4(numbers: Floats, cells: Cells) -> None:
    """Choose each scale so that the group's largest number rounds to 4 or 6."""
    groups, most = _grouped(numbers, GROUP_NUMBERS["mxfp4"])
    exponents = np.maximum((most.view(np.int32) + 0x200000 >> 23) - 129, -127)
    fits = (most > 0) & (most < TOO_LARGE)
    groups *= np.where(fits, _powers_of_two(-exponents), np.float32(0.0))
    half = numbers.shape[-1] // 2
    np.copyto(cells[..., :half], _e2m1_codes(groups))
    np.copyto(cells[..., half:], np.where(fits, exponents + 127, 0)[..., 0], casting="unsafe")


def _encode_fp4(numbers: Floats, cells: Cells) -> None:
    """Choose the head's power of two so that its largest e4m3 scale is 240 to 448 after rounding."""
    groups, most = _grouped(numbers, GROUP_NUMBERS["fp4"])
    whole = np.maximum.reduce(most, axis=-2)[..., None, :]  # [..., 1, 1], the largest of each head
    fits = (whole > FP4_SMALLEST) & (whole < TOO_LARGE)
    exponents = np.where(fits, (whole.view(np.int32) + (0x7FFFFF - 0x2E0000) >> 23) - 138, -127)
    factors = np.where(fits, _powers_of_two(-exponents), np.float32(0.0))
    codes = _to_e4m3(np.minimum(np.where(fits, most, 0.0) * factors / np.float32(6.0), E4M3_LARGEST))
    scales = E4M3_VALUES[codes] * np.float32(256.0)
    groups *= np.divide(factors, scales, out=np.zeros_like(scales), where=codes > 0)
    half = numbers.shape[-1] // 2
    np.copyto(cells[..., :half], _e2m1_codes(groups))
    np.copyto(cells[..., half:-1], codes[..., 0])
    np.copyto(cells[..., -1:], (exponents + 127)[..., 0], casting="unsafe")


def _grouped(numbers: Floats, group: int) -> tuple[Floats, Floats]:
    """Return numbers as [..., groups, group], a view, and the largest of each group: [..., groups, 1]."""
    groups = numbers.reshape(*numbers.shape[:-1], -1, group)
    np.copyto(groups, np.float32(0.0), where=np.isnan(groups))
    return groups, np.maximum.reduce(np.abs(groups), axis=-1, keepdims=True)


def _e2m1_codes(groups: Floats) -> Cells:
    """Round to e2m1, to nearest, ties to even. Byte i: number i in the low half, i + group / 2 in the high one."""
    sizes = np.abs(groups)
    codes = np.zeros(groups.shape, np.uint8)
    for tie, is_even_below in ((0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False)):
        codes += sizes > tie if is_even_below else sizes >= tie
    codes += sizes > 5.0
    codes |= ((groups < 0) & (codes > 0)).astype(np.uint8) << 3
    half = groups.shape[-1] // 2
    return (codes[..., :half] | codes[..., half:] << 4).reshape(*groups.shape[:-2], -1)


def _decode_groups(cells: Cells, scales: Floats, group: int, out: Floats) -> None:
    """Decode e2m1 codes with the scales [..., groups] of their groups."""
    codes = np.ascontiguousarray(cells[..., : out.shape[-1] // 2]).reshape(*scales.shape, group // 2)
    groups = out.reshape(*scales.shape, group)
    groups[..., : group // 2] = E2M1_VALUES[codes & 15]
    groups[..., group // 2 :] = E2M1_VALUES[codes >> 4]
    groups *= scales[..., None]


def _powers_of_two(exponents: npt.NDArray[np.int32]) -> Floats:
    """Return 2^n for -127 <= n <= 127, and NaN for 128, as e8m0 does."""
    bits = np.where(exponents < -126, 0x00400000, exponents + 127 << 23)
    return np.where(exponents > 127, 0x7FC00000, bits).astype(np.int32).view(np.float32)
