"""Rows that others look up for themselves: they find what was posted, and nothing else."""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import combinations_with_replacement
from typing import ClassVar

import pytest

from baton.move.ipc import board as boards
from baton.move.ipc.board import Board, PostedRows
from baton.move.ipc.lending import mapped

ROW_BYTES = 40
WORD_BYTES = 8
"""What a processor reads and writes at once, at least."""


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board("test", rows=4, row_bytes=ROW_BYTES)
    yield made
    made.close()


@pytest.fixture
def seen(board: Board) -> PostedRows:
    return PostedRows(mapped(board.descriptor, mmap.PROT_READ), ROW_BYTES)


def _row(number: int) -> bytes:
    return number.to_bytes(8, "little") * (ROW_BYTES // 8)


def test_what_is_posted_is_found_until_it_is_cleared_or_posted_over(board: Board, seen: PostedRows) -> None:
    board.post(5, _row(5))
    board.post(7, _row(7))
    assert (seen.row(5), seen.row(7)) == (_row(5), _row(7))
    board.post(9, _row(9))
    assert seen.row(5) == _row(9), "the place of 5 is that of 9"
    board.clear(5, _row(5)[:8])
    assert seen.row(9) == _row(9), "what is cleared is not there any more"
    board.clear(9, _row(9)[:8])
    found = seen.row(9)
    assert found is not None
    assert found[:8] == bytes(8)
    assert seen.row(7) == _row(7)


def test_who_is_lent_a_board_cannot_write_it(board: Board) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(board.descriptor, 4 * ROW_BYTES)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(board.descriptor, b"x", 0)


class Watched(mmap.mmap):
    """Writes word by word, and keeps what stood in the first row after each."""

    moments: ClassVar[list[bytes]] = []

    def __setitem__(self, place: slice, data: bytes) -> None:  # type: ignore[override]
        for at in range(place.start, place.stop, WORD_BYTES):
            super().__setitem__(slice(at, at + WORD_BYTES), data[at - place.start :][:WORD_BYTES])
            self.moments.append(bytes(self[:ROW_BYTES]))


class Changing:
    """Memory that changes under a look: each word that is read is of a given moment."""

    def __init__(self, moments: list[bytes], when: Iterable[int]) -> None:
        self._moments, self._when = moments, iter(when)

    def __len__(self) -> int:
        return ROW_BYTES

    def __getitem__(self, place: slice) -> bytes:
        words = range(place.start or 0, place.stop, WORD_BYTES)
        return b"".join(self._moments[next(self._when)][at : at + WORD_BYTES] for at in words)


def test_a_row_that_is_being_written_is_never_found_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """However a look falls among the writes of a post: it finds the old row, the new one, an empty one, or none."""
    monkeypatch.setattr(Watched, "moments", [])
    monkeypatch.setattr(boards.mmap, "mmap", Watched)
    board = Board("test", rows=1, row_bytes=ROW_BYTES)
    board.post(0, _row(1))
    del Watched.moments[:-1]
    board.post(0, _row(2))
    moments = Watched.moments
    assert (moments[0], moments[-1]) == (_row(1), _row(2))
    looks = list(combinations_with_replacement(range(len(moments)), 2 * ROW_BYTES // WORD_BYTES))
    found = Counter(PostedRows(Changing(moments, look), ROW_BYTES).row(0) for look in looks)  # type: ignore[arg-type]
    empty = {row for row in found if row is not None and not any(row[:WORD_BYTES])}
    assert found.keys() - empty == {None, _row(1), _row(2)}
    once = {Changing(moments, look)[:ROW_BYTES] for look in looks}
    assert any(row not in moments for row in once), "read once only, a row is found in parts"
    board.close()


def test_nothing_is_found_where_the_processor_may_reorder_what_it_writes(
    board: Board, seen: PostedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    board.post(1, _row(1))
    monkeypatch.setattr(boards, "ORDERED", False)
    assert seen.row(1) is None


def test_a_board_without_room_for_a_row_is_refused() -> None:
    """Whoever lends that is none of ours: there is no row to look into, at any number."""
    with pytest.raises(ValueError, match="has no row of 40"):
        PostedRows(memoryview(bytes(8)), ROW_BYTES)
