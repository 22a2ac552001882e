"""The legs of a request that two servers run at the same time: one computes the prompt, the other one answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing

from baton.integrations.engines.port import Choice, EngineBrokenError, EngineRefusedError, EngineServer, Generation


class OpenLeg:
    """The answer of a decode server whose worker is not told to decode yet. Its tokens wait here."""

    def __init__(self, server: EngineServer, generation: Generation) -> None:
        """Send the request at once. Create it in the event loop."""
        self.server = server
        self.generation = generation
        self._choices: asyncio.Queue[Choice | None] = asyncio.Queue()
        """At most `tokens_max` choices and the finish reason. None: the answer has ended."""
        self._error: EngineBrokenError | EngineRefusedError | None = None
        self._is_unwanted = False
        self.task = asyncio.ensure_future(self._read())

    def check(self) -> None:
        """Raise the error that has ended the answer, if there was one."""
        if self._error is not None:
            raise self._error

    async def choices(self) -> AsyncGenerator[Choice]:
        """Yield the answer from its begin, as `EngineServer.stream` does. Closing it closes the connection."""
        try:
            while (choice := await self._choices.get()) is not None:
                yield choice
            self.check()
        finally:
            self.task.cancel()

    def cancel(self) -> None:
        """End the request on the server, because no worker will read the answer."""
        self._is_unwanted = True
        self.task.cancel()

    async def _read(self) -> None:
        try:
            async with aclosing(self.server.stream(self.generation)) as choices:
                async for choice in choices:
                    self._choices.put_nowait(choice)
        except (EngineBrokenError, EngineRefusedError) as error:
            self._error = error
        except asyncio.CancelledError:
            self._error = EngineBrokenError(f"the answer of {self.server.url} was cancelled")
            if self._is_unwanted:
                await abort_quietly(self.server, self.generation.id)
            raise
        finally:
            self._choices.put_nowait(None)


async def abort_quietly(server: EngineServer, generation_id: str) -> None:
    """Abort a request by its id. A server that cannot be reached has ended it."""
    with contextlib.suppress(EngineBrokenError, EngineRefusedError):
        await server.abort(generation_id)
