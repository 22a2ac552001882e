"""Every number that a native step is given, made wrong: what the library would read or write is nothing of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from baton.compute.native.library import NativeStep
from baton.core.errors import ModelError

if TYPE_CHECKING:
    from tests.unit.compute.native_fuzz import Engine, Given

EXTREMES = (-(1 << 31), (1 << 31) - 1)
"""Of 32-bit numbers: sums of these do not fit into one."""


def refuses_what_is_not_there(engine: Engine, given: Given) -> None:
    """Whatever of a step's numbers is wrong is an error, and nothing is written. given: a step that is right."""
    before = engine.arena.copy()
    for wrong in _wrong(given, engine.shape.vocab, engine.blocks):
        assert _refuses(lambda wrong=wrong: engine.compute(wrong)), f"{wrong} was taken"
    for name, value in _wrong_lengths(given.step(engine.layers_done)):
        step = given.step(engine.layers_done)
        setattr(step, name, value)
        assert _refuses(lambda step=step: engine.library.forward(engine.handle, step)), f"{name} {value} was taken"
    assert (engine.arena == before).all()
    rows = len(engine.compute(given))
    for row in (rows, -1, *EXTREMES):
        assert _refuses(lambda row=row: engine.project([0, row])), f"row {row} of {rows} was projected"
        assert _refuses(lambda row=row: engine.read([0, row])), f"row {row} of {rows} was read"
    assert len(engine.project([rows - 1])) == len(engine.read([rows - 1])) == 1


def _wrong(given: Given, vocab: int, blocks: int) -> Iterator[Given]:
    """Change one number of a step, each to everything that it must not be."""
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
    """Say of an array that it is longer or shorter than what the slices need; no more slices than there are."""
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
