"""An HTTP server in the event loop of a test, which can end as a killed process does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

_ACCEPT_TURNS = 3
"""Turns of the event loop from accepting a connection until the server knows it, and one more."""


class LoopServer:
    """One start of a server."""

    def __init__(self, app: web.Application, port: int = 0, host: str = "127.0.0.1") -> None:
        """Take the address. 0: the system chooses the port."""
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        self._listening = socket.socket()
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listening.bind((host, port))
        self.port: int = self._listening.getsockname()[1]

    async def start(self) -> None:
        await self._runner.setup()
        await web.SockSite(self._runner, self._listening).start()

    async def stop(self) -> None:
        """Break all connections, and refuse further ones.

        asyncio leaks a connection that it has accepted in the turn before its server is closed, and aiohttp leaves one
        open that it does not know yet. So the server first stops to accept, and waits for those that it has accepted.
        """
        server = self._runner.server
        if server is None:
            return
        asyncio.get_running_loop().remove_reader(self._listening)
        await _turns(_ACCEPT_TURNS)
        for connection in server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await _turns(1)  # the event loop tells the handlers that their connections are lost
        await self._runner.cleanup()


async def _turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@asynccontextmanager
async def loop_server(app: web.Application) -> AsyncIterator[LoopServer]:
    server = LoopServer(app)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
