"""The C++ conversion has the bits of numpy's, for any bytes, strides and memories."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from baton.decide.kv.layout import BITS, KVDtype, cell_bytes
from baton.move import recoding
from baton.move.number_formats import encode
from baton.move.recoding import Recoding

CELLS = 60


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recoding, "copy_library", lambda: None)


@pytest.mark.parametrize("head_dim", [32, 64, 576])
@pytest.mark.parametrize("pair", list(permutations(BITS, 2)), ids="-".join)
def test_both_conversions_give_the_same_bits(
    pair: tuple[KVDtype, KVDtype], head_dim: int, request: pytest.FixtureRequest
) -> None:
    inputs = [some_cells(pair[0], head_dim, kind) for kind in ("any bytes", "numbers", "extremes")]
    fast = [recoded(pair, head_dim, cells) for cells in inputs]
    request.getfixturevalue("without_compiler")
    slow = [recoded(pair, head_dim, cells) for cells in inputs]
    for one, other in zip(fast, slow, strict=True):
        assert np.array_equal(one, other)


def recoded(pair: tuple[KVDtype, KVDtype], head_dim: int, cells: np.ndarray) -> np.ndarray:
    """Convert runs of 3 cells in two loops, in reverse order and with gaps. 7 marks bytes that must not change."""
    sizes = [cell_bytes(dtype, head_dim) for dtype in pair]
    target = np.full((4, 5, 4 * sizes[1]), 7, np.uint8)
    runs = [(5, 3 * sizes[0], -target.strides[1]), (4, 15 * sizes[0], target.strides[0])]
    start = 4 * target.strides[1]
    Recoding(*pair, head_dim).run((memoryview(cells.reshape(-1)), 0), (memoryview(target.reshape(-1)), start), 3, runs)
    assert (target[..., 3 * sizes[1] :] == 7).all()
    return target


def some_cells(dtype: KVDtype, head_dim: int, kind: str) -> np.ndarray:
    random = np.random.default_rng(head_dim)
    cells = random.integers(0, 256, (CELLS, cell_bytes(dtype, head_dim)), dtype=np.uint8)
    if kind == "any bytes":
        return cells
    numbers = random.normal(size=(CELLS, head_dim)) * 10.0 ** random.integers(-3, 3, (CELLS, 1))
    with np.errstate(all="ignore"):
        if kind == "extremes":
            numbers *= 10.0 ** random.integers(-40, 38, (CELLS, 1))
            numbers[::7, 3], numbers[::11, 5], numbers[::13], numbers[5] = np.nan, np.inf, 0.0, -0.0
        encode(numbers.astype(np.float32), dtype, cells)
    return cells


@pytest.mark.parametrize("source_offset", [-1, 1])
def test_runs_outside_of_their_memory_are_refused(source_offset: int) -> None:
    source, target = (memoryview(bytearray(cell_bytes(dtype, 32))) for dtype in ("float32", "mxfp4"))
    with pytest.raises((ValueError, TypeError)):
        Recoding("float32", "mxfp4", 32).run((source, source_offset), (target, 0), 1)
