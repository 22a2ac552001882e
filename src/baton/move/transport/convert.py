"""Execute plans of copies: what a transport pulls and where to, and how what was staged is put into the arena.

Copies are strided arrays over the two memories, so that a run of blocks costs one call and no loop over tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from baton.decide.kv.copy_plan import CopyPlan, StridedCopy
from baton.decide.kv.layout import DTYPE_BYTES, SCALE_BYTES, KVDtype
from baton.move.transport.numbers import decode, encode
from baton.move.transport.port import Extent

CHUNK_NUMBERS = 1 << 15
"""Numbers that are converted at a time: their float32 stay in a core's cache, and in memory that is reused."""


def offered(plan: CopyPlan, region: int) -> list[Extent]:
    """List what the source offers, of the region that is its arena."""
    return [Extent(read.offset_bytes, read.size_bytes, region) for read in plan.reads]


def received(plan: CopyPlan, arena: int, staging: int) -> list[Extent]:
    """List where that is pulled into: the regions that are the target's arena, and a buffer of `staging_bytes`."""
    return [
        Extent(landing.offset_bytes, landing.size_bytes, staging if landing.staged else arena)
        for landing in plan.landings
    ]


def unstage(plan: CopyPlan, staging: memoryview, arena: memoryview) -> None:
    """Put what was pulled into the staging buffer where it belongs."""
    for copy in plan.copies:
        _copy(plan, copy, (staging, copy.staged_bytes, [loop.staged_bytes for loop in copy.loops]), arena)


def convert(plan: CopyPlan, source: memoryview, arena: memoryview) -> None:
    """Do all that the plan says from memory that both see: nothing is pulled, and nothing staged."""
    from_source, into = np.frombuffer(source, np.uint8), np.frombuffer(arena, np.uint8)
    for landing in plan.landings:
        if not landing.staged:
            run = from_source[landing.source_bytes : landing.source_bytes + landing.size_bytes]
            into[landing.offset_bytes : landing.offset_bytes + landing.size_bytes] = run
    for copy in plan.copies:
        _copy(plan, copy, (source, copy.source_bytes, [loop.source_bytes for loop in copy.loops]), arena)


def _copy(plan: CopyPlan, copy: StridedCopy, source: tuple[memoryview, int, list[int]], arena: memoryview) -> None:
    """Do one copy out of a memory, from an offset on, with these strides."""
    memory, offset_bytes, strides = source
    counts = [loop.count for loop in copy.loops]
    into_strides = [loop.target_bytes for loop in copy.loops]
    cells = _cell_bytes(plan.source_dtype, plan.head_dim), _cell_bytes(plan.target_dtype, plan.head_dim)
    if plan.source_dtype == plan.target_dtype:
        run = np.dtype((np.void, copy.cells * cells[0]))  # a run is one item: numpy moves it by memcpy
        from_runs = np.ndarray(counts, run, memory, offset_bytes, strides)
        np.copyto(np.ndarray(counts, run, arena, copy.target_bytes, into_strides), from_runs)
        return
    counts.append(copy.cells)
    ours = np.ndarray([*counts, cells[0]], np.uint8, memory, offset_bytes, [*strides, cells[0], 1])
    theirs = np.ndarray([*counts, cells[1]], np.uint8, arena, copy.target_bytes, [*into_strides, cells[1], 1])
    for from_chunk, into_chunk in _chunks(ours, theirs, plan.head_dim):
        _recode(plan, from_chunk, into_chunk)


def _cell_bytes(dtype: KVDtype, head_dim: int) -> int:
    return head_dim * DTYPE_BYTES[dtype] + SCALE_BYTES.get(dtype, 0)


Cells = npt.NDArray[np.uint8]


def _chunks(ours: Cells, theirs: Cells, head_dim: int) -> Iterator[tuple[Cells, Cells]]:
    """Cut two arrays of cells along their outer dimensions alike, into pieces that fit into a cache."""
    inner_cells = int(np.prod(ours.shape[1:-1]))
    step = CHUNK_NUMBERS // (inner_cells * head_dim)
    if step == 0 and ours.ndim > 2:
        for one, other in zip(ours, theirs, strict=True):
            yield from _chunks(one, other, head_dim)
        return
    for start in range(0, len(ours), max(1, step)):
        yield ours[start : start + max(1, step)], theirs[start : start + max(1, step)]


def _recode(plan: CopyPlan, ours: Cells, theirs: Cells) -> None:
    numbers = np.empty((*ours.shape[:-1], plan.head_dim), np.float32)
    with np.errstate(all="ignore"):  # what is no number, or too large, becomes what the engines make of it
        decode(ours, plan.source_dtype, numbers)
        encode(numbers, plan.target_dtype, theirs)
