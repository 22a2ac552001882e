"""KV numbers are converted as torch does it, and 8-bit numbers as the native engine does it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.decide.kv.layout import KVDtype, cell_bytes
from baton.move.number_formats import E2M1_VALUES, decode, encode

TYPES: dict[KVDtype, torch.dtype] = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def encoded(numbers: np.ndarray, dtype: KVDtype) -> np.ndarray:
    cells = np.empty((*numbers.shape[:-1], cell_bytes(dtype, numbers.shape[-1])), np.uint8)
    with np.errstate(all="ignore"):
        encode(numbers.copy(), dtype, cells)
    return cells


def decoded(cells: np.ndarray, dtype: KVDtype) -> np.ndarray:
    size = cells.shape[-1]
    head_dim = next(dim for dim in range(1, 2 * size) if cell_bytes(dtype, dim) == size)
    numbers = np.empty((*cells.shape[:-1], head_dim), np.float32)
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


def test_e2m1_rounds_to_the_nearest_number_and_ties_to_the_even_code() -> None:
    """A 4 in the group fixes the scale at 1."""
    values = E2M1_VALUES[:8]
    ties = (values[1:] + values[:-1]) / 2
    numbers = np.zeros((3, 32), np.float32)
    numbers[:, 0] = 4
    numbers[0, 1:8], numbers[1, 1:8], numbers[2, 1:8] = ties, np.nextafter(ties, 0), -np.nextafter(ties, 9)
    found = decoded(encoded(numbers, "mxfp4"), "mxfp4")
    assert found[:, 0].tolist() == [4, 4, 4]
    assert found[0, 1:8].tolist() == [values[code + (code & 1)] for code in range(7)]
    assert found[1, 1:8].tolist() == values[:7].tolist()
    assert found[2, 1:8].tolist() == (-values[1:]).tolist()


NUMBERS = st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=64, max_size=64).map(
    lambda numbers: np.array([numbers], np.float32)
)


@given(numbers=NUMBERS)
def test_mxfp4_loses_at_most_a_fifth_of_a_number_or_a_fourteenth_of_its_group(numbers: np.ndarray) -> None:
    found = decoded(encoded(numbers, "mxfp4"), "mxfp4")
    lost = np.abs(found - numbers)[0].reshape(2, 32).astype(np.float64)
    sizes = np.abs(numbers[0].reshape(2, 32)).astype(np.float64)
    bound = np.maximum(sizes / 5, sizes.max(axis=1, keepdims=True) / 14)
    assert (lost <= np.maximum(bound * 1.0001, 2.0**-127)).all()  # the smallest scale is 2^-127


@given(numbers=NUMBERS)
def test_fp4_loses_at_most_a_quarter_of_a_number_or_a_tenth_of_its_group(numbers: np.ndarray) -> None:
    """Groups below 1/100,000 of the largest of the head have a coarser scale."""
    found = decoded(encoded(numbers, "fp4"), "fp4")
    lost = np.abs(found - numbers)[0].reshape(4, 16).astype(np.float64)
    sizes = np.abs(numbers[0].reshape(4, 16)).astype(np.float64)
    bound = np.maximum(sizes / 4, sizes.max(axis=1, keepdims=True) / 10)
    assert (lost <= np.maximum(bound, max(sizes.max() / 1e5, 1e-30))).all()


@pytest.mark.parametrize("dtype", ["fp4", "mxfp4"])
@given(numbers=NUMBERS)
def test_4_bits_are_stable_when_they_are_rounded_again(dtype: KVDtype, numbers: np.ndarray) -> None:
    """KV that was read from a tier and is written again does not drift."""
    once = decoded(encoded(numbers, dtype), dtype)
    assert np.array_equal(decoded(encoded(once, dtype), dtype), once)


@pytest.mark.parametrize("dtype", ["fp4", "mxfp4"])
def test_4_bits_keep_zeros_and_replace_what_is_no_number(dtype: KVDtype) -> None:
    numbers = np.zeros((3, 32), np.float32)
    numbers[1, :3] = (np.nan, 6.0, -0.0)
    numbers[2, 0] = np.inf
    cells = encoded(numbers, dtype)
    assert not cells[0].any()
    assert decoded(cells, dtype)[1, :4].tolist() == [0.0, 6.0, 0.0, 0.0]
    assert not decoded(cells, dtype)[2].any()
