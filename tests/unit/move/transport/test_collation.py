"""Short runs of host memory are read and written through a slab; long ones stay in place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.move.transport import extents
from baton.move.transport.extents import COLLATED_RUN_BYTES, Spread

MEMORY_BYTES = 4000


@given(
    cuts=st.lists(st.integers(1, MEMORY_BYTES - 1), min_size=2, max_size=30, unique=True),
    portion_bytes=st.integers(1, 700),
    seed=st.integers(0, 99),
)
def test_a_slab_gathers_and_scatters_the_bytes_of_every_range(cuts: list[int], portion_bytes: int, seed: int) -> None:
    """Every other piece between the cuts, in any order. Other bytes do not change."""
    random = np.random.default_rng(seed)
    borders = sorted(cuts)
    rows = np.array([(at, end - at, 0) for at, end in zip(borders[::2], borders[1::2], strict=False)], np.int64)
    random.shuffle(rows)
    source, target = random.integers(0, 256, (2, MEMORY_BYTES), dtype=np.uint8)
    offsets = np.concatenate([np.arange(at, at + size) for at, size, _ in rows.tolist()])
    spreads = [Spread(rows, {0: memoryview(memory)}) for memory in (source, target)]
    assert all(spread.is_collated for spread in spreads)
    start = int(random.integers(0, len(offsets)))
    size_bytes = int(random.integers(1, len(offsets) - start + 1))
    expected = target.copy()
    part = offsets[start : start + size_bytes]
    expected[part] = source[part]
    reads, writes = (each(start, size_bytes, portion_bytes) for each in (spreads[0].read, spreads[1].write))
    for (read,), (write,) in zip(reads, writes, strict=True):
        assert read.nbytes == write.nbytes <= portion_bytes
        write[:] = read
    assert np.array_equal(target, expected)


@pytest.mark.parametrize(("run_bytes", "is_collated"), [(COLLATED_RUN_BYTES - 1, True), (COLLATED_RUN_BYTES, False)])
def test_runs_that_are_long_on_average_are_sent_in_place(run_bytes: int, *, is_collated: bool) -> None:
    memory = memoryview(bytearray(4 * COLLATED_RUN_BYTES))
    spread = Spread(np.array([(0, run_bytes, 0), (2 * run_bytes, run_bytes, 0)], np.int64), {0: memory})
    assert spread.is_collated == is_collated
    size_bytes = spread.size_bytes
    assert spread.portion_bytes(size_bytes) == size_bytes  # both fit into one portion
    (views,) = spread.read(0, size_bytes, size_bytes)
    assert len(views) == (1 if is_collated else 2)


def test_a_slab_has_a_bounded_size() -> None:
    rows = np.array([(at, 1000, 0) for at in range(0, 4_000_000, 2000)], np.int64)
    spread = Spread(rows, {0: memoryview(bytearray(4_000_000))})
    assert spread.portion_bytes(spread.size_bytes) == extents.SLAB_BYTES
