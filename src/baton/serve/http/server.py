"""The HTTP server: uvicorn, except for its signal handlers and for the accepting of connections.

Event loops tell a protocol of a TLS connection only after its handshake. The limits have to count it before that. If a
connection cannot be accepted for lack of a file descriptor, uvloop closes it, or tries again without a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine, Generator
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
        self._listeners: list[Listener] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        self._listeners = [Listener(each, self._http_config, self.server_state) for each in sockets or ()]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self._listeners:
            await listener.close()
        await super().shutdown(sockets)


class Listener:
    """Accepts the connections of a listening socket, and does the TLS handshakes if the server has a certificate."""

    def __init__(self, listening: socket.socket, config: HttpServerConfig, server_state: ServerState) -> None:
        self._listening = listening
        self._config = config
        self._server_state = server_state
        self._connections = config.connections
        self._opening: set[asyncio.Task[None]] = set()
        """At most as many as there may be connections."""
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._begin()

    async def close(self) -> None:
        """Accept no further connection, and end those without a handshake."""
        self._loop.remove_reader(self._listening)
        if self._retry is not None:
            self._retry.cancel()
        for task in self._opening:
            task.cancel()
        if self._opening:
            await asyncio.wait(self._opening)

    def _begin(self) -> None:
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        """Accept one connection, so that streams go on while many clients connect at once."""
        try:
            connection, peer = self._listening.accept()
        except (BlockingIOError, ConnectionError):
            return  # the client has gone
        except OSError as error:
            self._connections.note_not_accepted(error)
            self._loop.remove_reader(self._listening)
            self._retry = self._loop.call_later(ACCEPT_RETRY_S, self._begin)
            return
        connection.setblocking(False)
        tls = self._config.tls
        opening = self._serve(connection) if tls is None else self._secure(connection, tls, client_address(peer[0]))
        if opening is not None:
            task = asyncio.create_task(opening)
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            await self._loop.connect_accepted_socket(
                lambda: BoundedHttpProtocol(self._config, self._server_state, {}), connection
            )

    def _secure(self, connection: socket.socket, tls: ServerTls, address: str) -> Coroutine[None, None, None] | None:
        """Return the handshake of a connection. None: it exceeds a limit and is closed."""
        handshake = Handshake(self._connections, address)
        error = self._connections.add(handshake)
        if error is None or self._connections.may_answer(handshake):
            return self._shake_hands(connection, tls, handshake)
        self._connections.note_refused(handshake.address, error)
        handshake.end()
        connection.close()
        return None

    async def _shake_hands(self, connection: socket.socket, tls: ServerTls, handshake: Handshake) -> None:
        try:
            with contextlib.suppress(OSError):  # the client speaks no TLS, is too slow or has gone
                await self._loop.connect_accepted_socket(
                    lambda: SecuredHttpProtocol(self._config, self._server_state, {}, handshake),
                    connection,
                    ssl=tls.context,
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
