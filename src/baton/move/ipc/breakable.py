"""Break tasks that wait for a server that is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class BreakableTasks:
    """The tasks that read from one server. Closing an HTTP session would leave their reads waiting."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def block(self) -> AsyncGenerator[None]:
        """Make `break_all` raise TimeoutError in this block."""
        async with asyncio.timeout(None) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    def break_all(self) -> None:
        for limit in self._limits:
            limit.reschedule(asyncio.get_running_loop().time())
