"""Copy many runs of bytes at once between memories of this process: one call of C++ where a compiler is.

Without one, each run is a call of Python's: some microseconds a run, and large copies at half the speed.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.move.compiling import NativeSources, NativeUnavailableError

log = logging.getLogger("baton.transfer")

COPIES = NativeSources(
    name="baton-copies",
    folder=Path(__file__).parent,
    flags=("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
    units={"copies": ()},
)
PAST_CACHE_BYTES = 2 << 20
"""Moves of so much in all do not fit into a core's cache together with what else is there."""

Runs = npt.NDArray[np.uint64]
"""[runs, 2]: address and size in bytes, in the order in which the bytes follow each other."""

Moves = npt.NDArray[np.uint64]
"""[moves, 3]: address from, address to, size in bytes. The memories must stay mapped until the moves are done."""

Copy = Callable[[Moves], None]
"""Carries out moves, which do not overlap, without holding the interpreter's lock."""


def paired(sources: Runs, targets: Runs) -> Moves:
    """Cut two lists of runs alike, which hold the same number of bytes."""
    if len(sources) == len(targets) and np.array_equal(sources[:, 1], targets[:, 1]):
        return np.column_stack((sources[:, 0], targets))
    ends = [runs[:, 1].cumsum() for runs in (sources, targets)]
    cuts = np.concatenate((np.zeros(1, np.uint64), *ends))
    cuts.sort(kind="stable")  # which merges what is sorted already
    cuts = cuts[np.flatnonzero(np.diff(cuts, append=cuts[:1]))]  # each once; the last differs from the first
    starts = cuts[:-1]
    moves = np.empty((len(starts), 3), np.uint64)
    for column, (runs, ending) in enumerate(zip((sources, targets), ends, strict=True)):
        shifts = runs[:, 0] - (ending - runs[:, 1])  # of addresses from positions; below zero they wrap, and back again
        moves[:, column] = shifts[ending.searchsorted(starts, side="right")] + starts
    moves[:, 2] = cuts[1:] - starts
    return moves


class MoveList:
    """Moves in a row. The moves of any run of their bytes can be cut out, by any thread."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._ends = np.cumsum(moves[:, 2])

    def cut(self, start: int, size_bytes: int) -> Moves:
        """What moves `size_bytes` bytes from `start` on."""
        end = start + size_bytes
        first, last = np.searchsorted(self._ends, np.array((start + 1, end), np.uint64)).tolist()
        part = self._moves[first : last + 1].copy()
        part[-1, 2] -= self._ends[last] - np.uint64(end)
        skipped = np.uint64(start) - (self._ends[first] - self._moves[first, 2])
        part[0, :2] += skipped
        part[0, 2] -= skipped
        return part


def address_of(memory: memoryview) -> int:
    """Where a flat memory begins. It may be read-only."""
    return np.frombuffer(memory, np.uint8).__array_interface__["data"][0]


def copy_one_by_one(moves: Moves) -> None:
    """Implements `Copy` without a compiler."""
    for source, target, size_bytes in moves.tolist():
        ctypes.memmove(target, source, size_bytes)


@functools.cache
def fastest_copy() -> Copy:
    """The best `Copy` that this machine has. Compiles it where it was not yet (a second, once per machine)."""
    try:
        library = ctypes.CDLL(str(COPIES.library_path()))
    except (NativeUnavailableError, OSError) as error:
        log.warning("KV between processes is copied run by run, at about half the speed: %s", error)
        return copy_one_by_one
    return functools.partial(_copy_at_once, library)


def _copy_at_once(library: ctypes.CDLL, moves: Moves) -> None:
    rows = np.ascontiguousarray(moves, np.uint64)
    address = ctypes.c_void_p(rows.ctypes.data)
    library.baton_move(address, ctypes.c_uint64(len(rows)), ctypes.c_uint64(PAST_CACHE_BYTES))
