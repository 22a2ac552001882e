"""Reserve a host's memory for KV before it is needed."""

from __future__ import annotations

import asyncio

from baton.move.arena.cuda import CudaArena
from baton.move.arena.memfd import Arena

_PAUSE_S = 0.02


async def prefault(arena: Arena | CudaArena) -> None:
    """Reserve the arena's memory in small bites, so that no step pays for it and no stream stalls."""
    position = 0
    while position < arena.bytes_total:
        position = arena.prefault(position)
        await asyncio.sleep(_PAUSE_S)
