"""Execute copy plans between two KV layouts: extents for the transport, and conversion of the staged bytes.

Copies are strided arrays over both memories, so that a run of blocks costs one call and no loop over tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from baton.decide.kv.copy_plan import CopyPlan, StridedCopy
from baton.decide.kv.layout import DTYPE_BYTES, SCALE_BYTES, KVDtype
from baton.move.transport.number_formats import decode, encode
from baton.move.transport.port import Extent

CHUNK_NUMBERS = 1 << 15
"""Numbers that are converted at a time, so that their float32 values stay in a core's cache."""


def source_extents(plan: CopyPlan, region: int) -> list[Extent]:
    """Return the extents that the source offers; `region` is its arena."""
    return [Extent(read.offset_bytes, read.size_bytes, region) for read in plan.reads]


def target_extents(plan: CopyPlan, arena: int, staging: int) -> list[Extent]:
    """Return the extents to pull into, in two regions: the target's arena, and a buffer of `staging_bytes`."""
    return [
        Extent(landing.offset_bytes, landing.size_bytes, staging if landing.staged else arena)
        for landing in plan.landings
    ]


def unstage(plan: CopyPlan, staging: memoryview, arena: memoryview) -> None:
    """Convert the bytes in the staging buffer and write them to the arena."""
    for copy in plan.copies:
        _copy(plan, copy, (staging, copy.staged_bytes, [loop.staged_bytes for loop in copy.loops]), arena)


def convert(plan: CopyPlan, source: memoryview, arena: memoryview) -> None:
    """Execute the whole plan from mapped source memory, without a transport or a staging buffer."""
    from_source, into = np.frombuffer(source, np.uint8), np.frombuffer(arena, np.uint8)
    for landing in plan.landings:
        if not landing.staged:
            run = from_source[landing.source_bytes : landing.source_bytes + landing.size_bytes]
            into[landing.offset_bytes : landing.offset_bytes + landing.size_bytes] = run
    for copy in plan.copies:
        _copy(plan, copy, (source, copy.source_bytes, [loop.source_bytes for loop in copy.loops]), arena)


def _copy(plan: CopyPlan, copy: StridedCopy, source: tuple[memoryview, int, list[int]], arena: memoryview) -> None:
    """Execute one copy. `source` is its memory, the offset of its first byte, and its strides."""
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
    from_cells = np.ndarray([*counts, cells[0]], np.uint8, memory, offset_bytes, [*strides, cells[0], 1])
    into_cells = np.ndarray([*counts, cells[1]], np.uint8, arena, copy.target_bytes, [*into_strides, cells[1], 1])
    for from_chunk, into_chunk in _chunks(from_cells, into_cells, plan.head_dim):
        _recode(plan, from_chunk, into_chunk)


def _cell_bytes(dtype: KVDtype, head_dim: int) -> int:
    return head_dim * DTYPE_BYTES[dtype] + SCALE_BYTES.get(dtype, 0)


Cells = npt.NDArray[np.uint8]


def _chunks(source: Cells, target: Cells, head_dim: int) -> Iterator[tuple[Cells, Cells]]:
    """Cut two arrays of cells in the same way along their outer dimensions, into pieces that fit into a cache."""
    inner_cells = int(np.prod(source.shape[1:-1]))
    step = CHUNK_NUMBERS // (inner_cells * head_dim)
    if step == 0 and source.ndim > 2:
        for one, other in zip(source, target, strict=True):
            yield from _chunks(one, other, head_dim)
        return
    for start in range(0, len(source), max(1, step)):
        yield source[start : start + max(1, step)], target[start : start + max(1, step)]


def _recode(plan: CopyPlan, source: Cells, target: Cells) -> None:
    numbers = np.empty((*source.shape[:-1], plan.head_dim), np.float32)
    with np.errstate(all="ignore"):  # NaN and overflow are handled by `encode`, as the engines do
        decode(source, plan.source_dtype, numbers)
        encode(numbers, plan.target_dtype, target)
