"""Wait until a picker has changed, by its own calls instead of a clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from baton.integrations.gateway.picker import Picker

WAIT_S = 60.0


class Changes:
    """Notices each change of a picker's servers and requests. Create it before they change."""

    def __init__(self, picker: Picker) -> None:
        self._changed = asyncio.Event()
        for name in ("join", "lose", "report", "end"):
            setattr(picker, name, self._noticed(getattr(picker, name)))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds, which only a change can bring about."""
        async with asyncio.timeout(WAIT_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    def _noticed(self, change: Callable[..., None]) -> Callable[..., None]:
        def call(*given: Any, **named: Any) -> None:
            change(*given, **named)
            self._changed.set()

        return call
