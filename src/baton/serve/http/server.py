"""The HTTP server: uvicorn, except for its signal handlers and for the accepting of TLS connections.

Event loops tell a protocol of a TLS connection only after its handshake. The limits have to count it before that.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from baton.move.ipc.tls import ServerTls
from baton.serve.http.connections import Connections, client_address
from baton.serve.http.protocol import BoundedHttpProtocol, HttpServerConfig

ACCEPT_RETRY_S = 1.0
"""Pause after a connection could not be accepted, such as for too many open files."""


class HttpServer(uvicorn.Server):
    """Serves until `should_exit`. The caller handles signals."""

    def __init__(self, config: HttpServerConfig) -> None:
        super().__init__(config)
        self._http_config = config
        self._listeners: list[TlsListener] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        tls = self._http_config.tls
        if tls is None or sockets is None:
            await super().startup(sockets)
            return
        self.servers = []
        self._listeners = [TlsListener(each, tls, self._http_config, self.server_state) for each in sockets]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self._listeners:
            await listener.close()
        await super().shutdown(sockets)


class TlsListener:
    """Accepts the connections of a listening socket, and does their TLS handshakes."""

    def __init__(
        self, listening: socket.socket, tls: ServerTls, config: HttpServerConfig, server_state: ServerState
    ) -> None:
        self._listening = listening
        self._tls = tls
        self._config = config
        self._server_state = server_state
        self._connections = config.connections
        self._handshakes: set[asyncio.Task[None]] = set()
        """At most as many as there may be connections."""
        listening.setblocking(False)
        self._accepting = asyncio.create_task(self._accept_all())

    async def close(self) -> None:
        """Accept no further connection, and end those without a handshake."""
        tasks = [self._accepting, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _accept_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(self._listening)
            except OSError:
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            handshake = Handshake(self._connections, client_address(peer[0]))
            error = self._connections.add(handshake)
            if error is not None and not self._connections.may_answer(handshake):
                self._connections.note_refused(handshake.address, error)
                handshake.end()
                connection.close()
                continue
            task = asyncio.create_task(self._shake_hands(connection, handshake))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, connection: socket.socket, handshake: Handshake) -> None:
        loop = asyncio.get_running_loop()
        try:
            with contextlib.suppress(OSError):  # the client speaks no TLS, is too slow or has gone
                await loop.connect_accepted_socket(
                    lambda: SecuredHttpProtocol(self._config, self._server_state, {}, handshake),
                    connection,
                    ssl=self._tls.context,
                    ssl_handshake_timeout=self._connections.limits.header_s,
                )
        finally:
            handshake.end()


class Handshake:
    """A connection that counts towards the limits until its handshake has ended."""

    def __init__(self, connections: Connections, address: str) -> None:
        self.address = address
        self._connections = connections
        self._is_counted = True

    def end(self) -> None:
        """Stop counting the connection. Does nothing the second time."""
        if self._is_counted:
            self._is_counted = False
            self._connections.remove(self)

    def end_if_overdue(self, now_s: float) -> None:
        """Do nothing: the event loop has the deadline of a handshake."""


class SecuredHttpProtocol(BoundedHttpProtocol):
    """A connection with TLS. It counts as an HTTP connection once its handshake is done."""

    def __init__(
        self, config: HttpServerConfig, server_state: ServerState, app_state: dict[str, Any], handshake: Handshake
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._handshake = handshake

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._handshake.end()
        super().connection_made(transport)
