"""KV numbers are converted as torch does it, and 8-bit numbers as the native engine does it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.decide.kv.layout import DTYPE_BYTES, SCALE_BYTES, KVDtype
from baton.move.transport.number_formats import decode, encode

TYPES: dict[KVDtype, torch.dtype] = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def encoded(numbers: np.ndarray, dtype: KVDtype) -> np.ndarray:
    cells = np.empty(
        (*numbers.shape[:-1], numbers.shape[-1] * DTYPE_BYTES[dtype] + SCALE_BYTES.get(dtype, 0)), np.uint8
    )
    with np.errstate(all="ignore"):
        encode(numbers.copy(), dtype, cells)
    return cells


def decoded(cells: np.ndarray, dtype: KVDtype) -> np.ndarray:
    numbers = np.empty(
        (*cells.shape[:-1], (cells.shape[-1] - SCALE_BYTES.get(dtype, 0)) // DTYPE_BYTES[dtype]), np.float32
    )
    decode(cells, dtype, numbers)
    return numbers


def numbers_around_every_tie() -> np.ndarray:
    """Every upper half of a float32, with the lower halves around the tie of bfloat16, and those of float16."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF], np.uint32)
    numbers = (upper[:, None] | lower).view(np.float32)
    return numbers[~np.isnan(numbers).any(axis=1)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_that_of_torch_bit_for_bit(dtype: KVDtype) -> None:
    numbers = numbers_around_every_tie()
    expected = torch.from_numpy(numbers).to(TYPES[dtype]).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(encoded(numbers, dtype).view(np.uint16), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_no_number_stays_none(dtype: KVDtype) -> None:
    nans = np.array([[0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0xFF800001]], np.uint32).view(np.float32)
    cells = encoded(nans, dtype)
    assert np.isnan(decoded(cells, dtype)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_widening_is_that_of_torch_bit_for_bit(dtype: KVDtype) -> None:
    codes = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    expected = torch.from_numpy(codes.view(np.int16)).view(TYPES[dtype]).float().numpy()
    found = decoded(codes.view(np.uint8), dtype)
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(np.signbit(found), np.signbit(expected))


def test_codes_of_fp8_are_those_of_torch() -> None:
    """The scale is 1 where the largest number is 448. Only a negative zero differs: the engine has none."""
    steps = np.linspace(-448, 448, 20001, dtype=np.float32)
    small = np.linspace(-0.05, 0.05, 20001, dtype=np.float32)
    numbers = np.concatenate([steps, small, np.arange(-64, 65, dtype=np.float32) / 1024, [np.float32(-0.0)]])[None]
    codes, scale = np.split(encoded(numbers, "fp8"), [numbers.shape[-1]], axis=-1)
    assert scale.view(np.float32) == 1.0
    expected = torch.from_numpy(numbers).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(codes, np.where((expected == 0x80) & (numbers == 0), 0, expected))
    assert np.array_equal(decoded(np.concatenate([codes, scale], axis=-1), "fp8"), to_float(codes))


def to_float(codes: np.ndarray) -> np.ndarray:
    return torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_halves_lose_at_most_half_of_their_last_bit(dtype: KVDtype, bound: float) -> None:
    numbers = np.random.default_rng(3).normal(size=(400, 64)).astype(np.float32)
    lost = np.abs(decoded(encoded(numbers, dtype), dtype) - numbers)
    assert (lost <= np.maximum(np.abs(numbers) * bound, 2.0**-25)).all()


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_8_bits_lose_at_most_half_a_code(dtype: KVDtype, size: float) -> None:
    numbers = (np.random.default_rng(4).normal(size=(400, 64)) * size).astype(np.float32)
    largest = np.abs(numbers).max(axis=-1, keepdims=True)
    lost = np.abs(decoded(encoded(numbers, dtype), dtype) - numbers)
    bound = largest / 254 if dtype == "int8" else np.abs(numbers) / 16 + largest / 448 / 1024
    assert (lost <= bound * 1.001).all()


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_head_of_zeros_and_one_with_no_end_are_zeros_without_a_scale(dtype: KVDtype) -> None:
    numbers = np.array([[0.0, -0.0], [np.inf, 0.0], [2e38, 0.0]], np.float32)
    cells = encoded(numbers, dtype)
    assert not cells[0].any()
    assert not cells[:, -4:].any()
    assert not decoded(cells, dtype).any()


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_what_is_no_number_is_zero_and_spares_the_rest_of_its_head(dtype: KVDtype) -> None:
    cells = encoded(np.array([[1.0, np.nan, -0.5]], np.float32), dtype)
    assert cells[0, 1] == 0
    assert decoded(cells, dtype) == pytest.approx(np.array([[1.0, 0.0, -0.5]]), abs=0.005)


@pytest.mark.parametrize(("dtype", "largest"), [("int8", [127, 129]), ("fp8", [0x7E, 0xFE])])
def test_numbers_too_small_for_a_finite_factor_are_the_largest_codes(dtype: KVDtype, largest: list[int]) -> None:
    """As in the engine: the scale holds the magnitude."""
    cells = encoded(np.array([[1e-37, -1e-37]], np.float32), dtype)
    assert cells[0, :2].tolist() == largest
