"""Execute copy plans between two KV layouts: extents for the transport, and conversion of the staged bytes.

Copies are strided arrays over both memories, so that a run of blocks costs one call and no loop over tokens.
"""

from __future__ import annotations

import numpy as np

from baton.decide.kv.copy_plan import CopyPlan, StridedCopy
from baton.decide.kv.layout import cell_bytes
from baton.move.recoding import Recoding
from baton.move.transport.port import Extent


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
    if plan.source_dtype == plan.target_dtype:
        run_bytes = copy.cells * cell_bytes(plan.source_dtype, plan.head_dim)
        run = np.dtype((np.void, run_bytes))  # a run is one item: numpy moves it by memcpy
        from_runs = np.ndarray(counts, run, memory, offset_bytes, strides)
        np.copyto(np.ndarray(counts, run, arena, copy.target_bytes, into_strides), from_runs)
        return
    loops = list(zip(counts, strides, into_strides, strict=True))
    recoding = Recoding(plan.source_dtype, plan.target_dtype, plan.head_dim)
    recoding.run((memory, offset_bytes), (arena, copy.target_bytes), copy.cells, loops)
