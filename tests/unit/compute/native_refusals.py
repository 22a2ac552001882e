"""Make every number of a native step invalid, and check that the library refuses the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from baton.compute.native.library import NativeStep
from baton.core.errors import ModelError

if TYPE_CHECKING:
    from tests.unit.compute.native_fuzz import Engine, Given

EXTREMES = (-(1 << 31), (1 << 31) - 1)
"""32-bit numbers whose sums do not fit into 32 bits."""


def refuses_what_is_not_there(engine: Engine, given: Given) -> None:
    """Check that any invalid number of a step is an error, and nothing is written. given: a valid step."""
    before = engine.arena.copy()
    for wrong in _wrong(given, engine.shape.vocab, engine.blocks):
        assert _refuses(lambda wrong=wrong: engine.compute(wrong)), f"{wrong} was taken"
    for name, value in _wrong_lengths(given.step(engine.layers_done)):
        step = given.step(engine.layers_done)
        setattr(step, name, value)
        assert _refuses(lambda step=step: engine.library.forward(engine.handle, step)), f"{name} {value} was taken"
    for read in (-1, given.counts[0] + 1, *EXTREMES):
        assert _refuses(lambda read=read: _compute(engine, given, [read, *given.counts[1:]])), f"{read} rows were read"
    assert (engine.arena == before).all()
    rows = len(engine.compute(given))
    for row in (rows, -1, *EXTREMES):
        assert _refuses(lambda row=row: engine.project([0, row])), f"row {row} of {rows} was projected"
        assert _refuses(lambda row=row: engine.read([0, row])), f"row {row} of {rows} was read"
    assert len(engine.project([rows - 1])) == len(engine.read([rows - 1])) == 1


def computes_what_is_read(engine: Engine, given: Given) -> None:
    """Check that rows have the same bits if a step reads a part of its rows, and that no other row can be projected."""
    expected = engine.compute(given)
    read = [count // 2 for count in given.counts]
    _compute(engine, given, read)
    ends = np.cumsum(given.counts)
    rows = [row for end, count in zip(ends, read, strict=True) for row in range(end - count, end)]
    assert (engine.project(rows).view(np.int32) == expected[rows].view(np.int32)).all()
    assert _refuses(lambda: engine.project([0])), "an unread row was projected"


def _compute(engine: Engine, given: Given, read: list[int]) -> None:
    """Compute a step of which the last `read` rows of each slice are read afterwards. Raises ModelError."""
    step, counts = given.step(engine.layers_done), np.array(read, dtype=np.int32)
    step.read = counts.ctypes.data
    engine.library.forward(engine.handle, step)


def _wrong(given: Given, vocab: int, blocks: int) -> Iterator[Given]:
    """Yield copies of a step with one number changed to each kind of invalid value."""
    for index in {0, len(given.tokens) - 1}:
        for token in (vocab, -1, *EXTREMES):
            yield _changed(given, "tokens", index, token)
    for index in {0, len(given.blocks) - 1}:
        for block in (blocks, -1, *EXTREMES):
            yield _changed(given, "blocks", index, block)
    for index in {0, len(given.counts) - 1}:
        for count in (given.counts[index] + 1, 0, -1, 1 << 20, *EXTREMES):
            yield _changed(given, "counts", index, count)
        for start in (len(given.angles) - given.counts[index] + 1, -1, 1 << 20, *EXTREMES):
            yield _changed(given, "starts", index, start)
        for size in (given.block_counts[index] - 1, given.block_counts[index] + 1, 0, -1, *EXTREMES):
            yield _changed(given, "block_counts", index, size)


def _changed(given: Given, field: str, index: int, value: int) -> Given:
    array = getattr(given, field).copy()
    array[index] = value
    return replace(given, **{field: array})


def _wrong_lengths(step: NativeStep) -> Iterator[tuple[str, int]]:
    """Yield lengths of arrays that are longer or shorter than the slices need."""
    for name, value in (("rows", step.rows), ("entries", step.entries)):
        for other in (value - 1, value + 1, 0, -1, *EXTREMES):
            yield name, other
    for name, value in (("positions", step.positions), ("slices", step.slices)):
        for other in (value - 1, 0, -1, EXTREMES[0]):
            yield name, other


def _refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except ModelError:
        return True
    return False
