"""Rows that others look up for themselves: they find what was posted, and nothing else."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator

import pytest

from baton.machine import board as boards
from baton.machine.board import Board, PostedRows
from baton.machine.lending import mapped

ROW_BYTES = 40


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


def test_a_row_that_is_being_written_is_never_found_in_parts(board: Board, seen: PostedRows) -> None:
    """A reader beside a writer sees whole rows, empty ones, or none."""
    done = threading.Event()

    def write() -> None:
        for number in range(1, 20_001):
            board.post(0, _row(number))
        done.set()

    writing = threading.Thread(target=write)
    writing.start()
    whole = 0
    while not done.is_set():
        row = seen.row(0)
        if row is not None and any(row[:8]):
            assert row == _row(int.from_bytes(row[:8], "little"))
            whole += 1
    writing.join()
    assert whole or seen.row(0) == _row(20_000)


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
