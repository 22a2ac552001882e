"""Background tasks of a host: start one, and reserve the arena's memory in one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from baton.core.errors import ArenaError
from baton.move.arena.cuda import CudaArena
from baton.move.arena.memfd import Arena

_PREFAULT_PAUSE_S = 0.02


def spawn(work: Coroutine[None, None, None], tell: Callable[[str], None]) -> asyncio.Task[None]:
    """Start a background task. If it fails, report the bug with `tell`: no caller awaits the task."""
    task = asyncio.create_task(work)

    def report(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            what = f"{work.__name__.strip('_')} ended: {type(error).__name__}: {error}"
            tell(f"a bug of ours, please report it: {what}; requests go on, restart to get it back")

    task.add_done_callback(report)
    return task


async def prefault(arena: Arena | CudaArena, failed: Callable[[str], None]) -> None:
    """Reserve the arena's pages in small portions, so that no step pays for a first use and no stream stalls.

    Call `failed` with the reason if the system has less memory than the arena.
    """
    position = 0
    while position < arena.bytes_total:
        try:
            position = arena.prefault(position)
        except ArenaError as error:
            failed(str(error))
            return
        await asyncio.sleep(_PREFAULT_PAUSE_S)
