"""Copy many runs of bytes between memories of this process in one call, with C++ if there is a compiler.

Without a compiler each run is a separate call: it costs some microseconds, and large copies run at half the speed.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.move.compiling import NativeSources, NativeUnavailableError

log = logging.getLogger("baton.transfer")

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi")
_INSTRUCTION_SETS = {"x86_64": {"recode_avx2": AVX2, "recode_avx512": AVX512}}


def copy_sources(machine: str) -> NativeSources:
    """Return the sources of the copy library for one kind of machine, such as `aarch64`."""
    units = dict.fromkeys(("copies", "recode", "recode_plain"), ()) | _INSTRUCTION_SETS.get(machine, {})
    return NativeSources(name="baton-copies", folder=Path(__file__).parent, flags=_FLAGS, units=units)


COPIES = copy_sources(platform.machine())
KV_FORMATS = COPIES.folder / "kv_formats.h"
PAST_CACHE_BYTES = 2 << 20
"""Moves of this size or more bypass the cache, because they would evict everything else from it."""

Runs = npt.NDArray[np.uint64]
"""[runs, 2]: address and size in bytes, in the order of the bytes."""

Moves = npt.NDArray[np.uint64]
"""[moves, 3]: source address, target address, size in bytes. The memories must stay mapped until the moves are done."""

Copy = Callable[[Moves], None]
"""Executes moves, which do not overlap, without holding the interpreter's lock."""


def paired(sources: Runs, targets: Runs) -> Moves:
    """Return the moves from one list of runs to another of the same total size, cut at the borders of both."""
    if len(sources) == len(targets) and np.array_equal(sources[:, 1], targets[:, 1]):
        return np.column_stack((sources[:, 0], targets))
    ends = [runs[:, 1].cumsum() for runs in (sources, targets)]
    cuts = np.concatenate((np.zeros(1, np.uint64), *ends))
    cuts.sort(kind="stable")  # the stable sort merges the two sorted parts in linear time
    cuts = cuts[np.flatnonzero(np.diff(cuts, append=cuts[:1]))]  # remove duplicates; the last differs from the first
    starts = cuts[:-1]
    moves = np.empty((len(starts), 3), np.uint64)
    for column, (runs, ending) in enumerate(zip((sources, targets), ends, strict=True)):
        shifts = runs[:, 0] - (ending - runs[:, 1])  # address minus position; may wrap below zero, and wraps back
        moves[:, column] = shifts[ending.searchsorted(starts, side="right")] + starts
    moves[:, 2] = cuts[1:] - starts
    return moves


class MoveList:
    """A sequence of moves. Any thread can extract the moves of any range of its bytes."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._ends = np.cumsum(moves[:, 2])

    def cut(self, start: int, size_bytes: int) -> Moves:
        """Return the moves of `size_bytes` bytes from `start` on."""
        end = start + size_bytes
        first, last = np.searchsorted(self._ends, np.array((start + 1, end), np.uint64)).tolist()
        part = self._moves[first : last + 1].copy()
        part[-1, 2] -= self._ends[last] - np.uint64(end)
        skipped = np.uint64(start) - (self._ends[first] - self._moves[first, 2])
        part[0, :2] += skipped
        part[0, 2] -= skipped
        return part


def address_of(memory: memoryview) -> int:
    """Return the address of a contiguous memory, which may be read-only."""
    return np.frombuffer(memory, np.uint8).__array_interface__["data"][0]


def copy_one_by_one(moves: Moves) -> None:
    """Implements `Copy` in Python."""
    for source, target, size_bytes in moves.tolist():
        ctypes.memmove(target, source, size_bytes)


@functools.cache
def copy_library() -> ctypes.CDLL | None:
    """Return the library that copies and converts KV, or None. The first call on a machine compiles it: 2 seconds."""
    try:
        return ctypes.CDLL(str(COPIES.library_path()))
    except (NativeUnavailableError, OSError) as error:
        log.warning("KV is copied run by run at half the speed, and converted below a fifth: %s", error)
        return None


def fastest_copy() -> Copy:
    """Return the fastest `Copy` of this machine."""
    library = copy_library()
    return copy_one_by_one if library is None else functools.partial(_copy_at_once, library)


def _copy_at_once(library: ctypes.CDLL, moves: Moves) -> None:
    rows = np.ascontiguousarray(moves, np.uint64)
    address = ctypes.c_void_p(rows.ctypes.data)
    library.baton_move(address, ctypes.c_uint64(len(rows)), ctypes.c_uint64(PAST_CACHE_BYTES))
