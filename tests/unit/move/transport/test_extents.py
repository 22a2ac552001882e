"""Runs of bytes as arrays: runs outside of a region are refused before they become addresses."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.core.errors import TransferError
from baton.move.transport.extents import Spread, collated, cut_rows, rows_of
from baton.move.transport.port import Extent

MEMORY = memoryview(bytearray(random.Random(1).randbytes(1000)))


@pytest.mark.parametrize(
    ("extent", "words"),
    [
        (Extent(0, 1001), "lie outside of region 0, which has 1000"),
        (Extent(999, 2), "lie outside"),
        (Extent(-1, 5), "lie outside"),
        (Extent(5, 0), "lie outside"),
        (Extent(5, -3), "lie outside"),
        (Extent((1 << 63) - 1, (1 << 63) - 1), "lie outside"),
        (Extent(1 << 63, 1), "larger than any memory"),
        (Extent(0, 1, 1), "region 1 does not exist, 1 are registered"),
        (Extent(0, 1, -1), "region -1 does not exist"),
    ],
)
def test_what_lies_outside_is_refused(extent: Extent, words: str) -> None:
    """Among valid ones: the numbers of a foreign ticket become addresses."""
    with pytest.raises(TransferError, match=words):
        Spread(rows_of([Extent(0, 1000), extent, Extent(7, 7)]), {0: MEMORY})


def test_any_part_can_be_cut_out() -> None:
    """As views and as addresses, compared with an oracle that joins the extents first."""
    rng = random.Random(3)
    for _ in range(50):
        extents = [Extent(rng.randrange(900), rng.randrange(1, 100)) for _ in range(rng.randrange(1, 12))]
        spread = Spread(rows_of(extents), {0: MEMORY})
        whole = b"".join(MEMORY[e.offset_bytes : e.offset_bytes + e.size_bytes] for e in extents)
        start = rng.randrange(len(whole))
        size_bytes = rng.randrange(1, len(whole) - start + 1)
        part = whole[start : start + size_bytes]
        assert b"".join(spread.cut(start, size_bytes)) == part
        base = np.frombuffer(MEMORY, np.uint8).ctypes.data
        runs = spread.addresses(start, size_bytes).tolist()
        assert b"".join(MEMORY[address - base : address - base + size] for address, size in runs) == part


def test_neighbours_are_collated() -> None:
    """Adjacent rows of one region are merged, and a cut does not modify the list."""
    rows = rows_of([Extent(0, 10), Extent(10, 5), Extent(15, 1, 1), Extent(30, 2, 1), Extent(32, 2, 1), Extent(0, 9)])
    merged = collated(rows)
    assert merged.tolist() == [[0, 15, 0], [15, 1, 1], [30, 4, 1], [0, 9, 0]]
    assert cut_rows(merged, 14, 3).tolist() == [[14, 1, 0], [15, 1, 1], [30, 1, 1]]
    assert merged.tolist() == [[0, 15, 0], [15, 1, 1], [30, 4, 1], [0, 9, 0]]
