"""Background work of a host: start tasks, run blocking work in threads, and reserve the arena's memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TypeVar

from baton.core.errors import ArenaError, BatonError
from baton.move.arena.cuda import CudaArena
from baton.move.arena.memfd import Arena

_PREFAULT_PAUSE_S = 0.02
Result = TypeVar("Result")


def spawn(work: Coroutine[None, None, None], tell: Callable[[str], None]) -> asyncio.Task[None]:
    """Start a background task. If it fails, report the error with `tell`, because no caller awaits the task."""
    task = asyncio.create_task(work)

    def report(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            what = f"{work.__name__.strip('_')} ended: {type(error).__name__}: {error}"
            tell(
                f"a bug in Baton, please report it: {what}; requests go on; restart this process to run the task again"
            )

    task.add_done_callback(report)
    return task


def run_in_thread(work: Callable[[], Result]) -> asyncio.Future[Result]:
    """Run blocking work in a daemon thread of its own. Cancelling the future abandons the thread.

    The event loop's executor is not used: its threads are joined when the process ends, which would then wait for a
    name server or a download that does not answer.
    """
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except (BatonError, OSError) as error:
            outcome.set_exception(error)
        finally:
            if not outcome.done():
                outcome.set_exception(RuntimeError("a bug in Baton has ended a thread, with the traceback above"))

    outcome.set_running_or_notify_cancel()
    threading.Thread(target=run, name="baton-host-work", daemon=True).start()
    return asyncio.wrap_future(outcome)


async def prefault(arena: Arena | CudaArena, failed: Callable[[str], None]) -> None:
    """Make the system provide the arena's pages now, so that no step waits for them.

    The work is split into small portions, so that no stream stalls. Call `failed` with the reason if the system has
    less memory than the arena.
    """
    position = 0
    while position < arena.bytes_total:
        try:
            position = arena.prefault(position)
        except ArenaError as error:
            failed(str(error))
            return
        await asyncio.sleep(_PREFAULT_PAUSE_S)
