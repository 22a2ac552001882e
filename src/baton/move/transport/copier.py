"""Pulls between memories of one machine: a few threads copy, without holding the interpreter's lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np

from baton.core.errors import TransferError
from baton.move.copies import PAST_CACHE_BYTES, Copy, MoveList, Runs, address_of, paired
from baton.move.threads import WorkThreads
from baton.move.transport.extents import Spread
from baton.move.transport.piecewise_pull import BUG, CLOSED, PiecewisePull, PullPiece

Move = Callable[[PullPiece], None]
"""Copies one piece, and returns when the copy is complete. May raise TransferError."""

_PIECE_BYTES_MIN = PAST_CACHE_BYTES
_SHARE_BYTES_MAX = 32 << 20
TURNS = 4
"""Pieces per thread, unless they would be too small: if one thread starts late, the others take more pieces.

A cancel waits for the end of a piece.
"""


class Copier:
    """Threads that carry out pulls by copying. They start with the first pull."""

    def __init__(self, threads: int, copy: Copy, *, turns: int = TURNS) -> None:
        """`turns`: pieces per thread."""
        self._copy = copy
        self._turns = turns
        self._threads_max = threads
        self._threads = WorkThreads("baton-copy", threads, self._fail_all)
        self._lock = threading.Lock()
        self._pulls: set[PiecewisePull] = set()
        self._closed = False

    def start(self, pull: PiecewisePull, begin: Callable[[], Move]) -> None:
        """Carry out a pull. A thread calls `begin` first; it raises TransferError if the pull is not allowed."""
        self._enter(pull)
        self._add(pull, lambda: self._begin(pull, begin))

    def from_spread(self, pull: PiecewisePull, source: Spread) -> Move:
        """Return the function that copies the pieces of a pull from `source`."""
        target = pull.target
        if not (source.is_direct and target.is_direct):
            return lambda piece: copy_portions(
                self._copy, source, target, range(piece.start, piece.start + piece.size_bytes)
            )
        moves = MoveList(paired(source.all_addresses(), target.all_addresses()))
        return lambda piece: self._copy(moves.cut(piece.start, piece.size_bytes))

    def close(self) -> None:
        """Fail every pull. No thread is left when this returns."""
        with self._lock:
            self._closed = True
        self._fail_all(CLOSED)
        self._threads.stop()
        self._threads.join()

    def _fail_all(self, why: str) -> None:
        with self._lock:
            pulls = list(self._pulls)
        for pull in pulls:
            pull.fail(why)

    def _enter(self, pull: PiecewisePull) -> None:
        with self._lock:
            if not self._closed:
                self._pulls.add(pull)
        pull.then(lambda: self._pulls.discard(pull))

    def _add(self, pull: PiecewisePull, work: Callable[[], None]) -> None:
        why = CLOSED if self._closed else self._threads.submit(work)
        if why:
            pull.fail(why)

    def _begin(self, pull: PiecewisePull, begin: Callable[[], Move]) -> None:
        move: Move | None = None
        why = BUG
        try:
            move = begin()
        except (TransferError, OSError, ValueError) as error:
            why = f"the source's memory cannot be used: {error}"
        finally:
            if move is None:
                pull.fail(why)
        if move is not None:
            self._share_out(pull, move)

    def _share_out(self, pull: PiecewisePull, move: Move) -> None:
        share_bytes = min(pull.target.size_bytes // self._threads_max + 1, _SHARE_BYTES_MAX)
        for piece in pull.pieces(max(share_bytes // self._turns, _PIECE_BYTES_MIN)):
            self._add(pull, lambda piece=piece: _move_piece(piece, move))


def copy_portions(copy: Copy, source: Spread, target: Spread, part: range) -> None:
    """Copy a range of bytes from or to device memory, portion by portion."""
    portion_bytes = min(spread.portion_bytes(len(part)) for spread in (source, target))
    reads, writes = (each(part.start, len(part), portion_bytes) for each in (source.read, target.write))
    with closing(reads), closing(writes):
        for from_views, into_views in zip(reads, writes, strict=True):  # strict: runs both generators to their end
            copy(paired(_runs(from_views), _runs(into_views)))


def _runs(views: Sequence[memoryview]) -> Runs:
    return np.array([(address_of(view), view.nbytes) for view in views], np.uint64)


def _move_piece(piece: PullPiece, move: Move) -> None:
    pull = piece.pull
    if not pull.begin():
        return
    is_moved, why = False, BUG
    try:
        move(piece)
        is_moved = True
    except (TransferError, OSError, ValueError) as error:
        why = f"{piece.size_bytes} bytes at {piece.start} could not be moved: {error}"
    finally:
        if not is_moved:
            pull.fail(why)
            pull.left()
    if is_moved:
        pull.landed(piece)


def no_interrupt(pull: PiecewisePull) -> None:
    """Do nothing: a copy under way is short, so it is not interrupted."""
