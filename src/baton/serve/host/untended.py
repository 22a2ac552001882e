"""Tasks that nobody waits for: where one fails, that is said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine


def untended(work: Coroutine[None, None, None], tell: Callable[[str], None]) -> asyncio.Task[None]:
    """Run something beside the rest. Whoever waits for it at last need not look at how it ended."""
    task = asyncio.create_task(work)

    def ended(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            what = f"{work.__name__.strip('_')} ended: {type(error).__name__}: {error}"
            tell(f"a bug of ours, please report it: {what}; requests go on, restart to get it back")

    task.add_done_callback(ended)
    return task
