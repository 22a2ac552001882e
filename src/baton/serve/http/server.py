"""The HTTP server: uvicorn, without its signal handlers and with Baton's own code to accept connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Coroutine, Generator
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from baton.move.ipc.acceptor import Acceptor
from baton.move.ipc.tls import ServerTls
from baton.move.memory_limits import map_large_blocks
from baton.serve.http.connections import Connections, client_address
from baton.serve.http.protocol import BoundedHttpProtocol
from baton.serve.http.timed_connection import HttpServerConfig


class HttpServer(uvicorn.Server):
    """Serves until `should_exit` is set. Signals are left to the caller."""

    def __init__(self, config: HttpServerConfig) -> None:
        super().__init__(config)
        self._http_config = config
        self._acceptors: list[Acceptor] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        map_large_blocks()
        self.servers = []
        listener = Listener(self._http_config, self.server_state)
        self._acceptors = [Acceptor(each, listener) for each in sockets or ()]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            await acceptor.close()
        await super().shutdown(sockets)


class Listener:
    """Implements `ConnectionReceiver` for HTTP. Does the TLS handshakes if the server has a certificate."""

    def __init__(self, config: HttpServerConfig, server_state: ServerState) -> None:
        self._config = config
        self._server_state = server_state
        self._connections = config.connections
        self._loop = asyncio.get_running_loop()

    def receive(self, connection: socket.socket, address: str) -> Coroutine[None, None, None] | None:
        """Return a coroutine that opens an accepted connection. None: it exceeds a limit and was closed."""
        tls = self._config.tls
        return self._serve(connection) if tls is None else self._secure(connection, tls, client_address(address))

    async def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            await self._loop.connect_accepted_socket(
                lambda: BoundedHttpProtocol(self._config, self._server_state, {}), connection
            )

    def _secure(self, connection: socket.socket, tls: ServerTls, address: str) -> Coroutine[None, None, None] | None:
        """Return a coroutine for the TLS handshake of a connection. None: it exceeds a limit and was closed."""
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
            with contextlib.suppress(OSError):  # the client does not use TLS, is too slow or has gone
                await self._loop.connect_accepted_socket(
                    lambda: SecuredHttpProtocol(self._config, self._server_state, {}, handshake),
                    connection,
                    ssl=tls.context,
                    ssl_handshake_timeout=self._connections.limits.header_s,
                )
        finally:
            handshake.end()


class Handshake:
    """Counts a connection towards the limits while its TLS handshake runs."""

    def __init__(self, connections: Connections, address: str) -> None:
        self.address = address
        self._connections = connections
        self._is_counted = True

    def end(self) -> None:
        """Stop counting the connection. Further calls do nothing."""
        if self._is_counted:
            self._is_counted = False
            self._connections.remove(self)

    def end_if_overdue(self, now_s: float) -> None:
        """Do nothing, because the event loop enforces the deadline of a handshake."""


class SecuredHttpProtocol(BoundedHttpProtocol):
    """An HTTP connection over TLS. It counts as an HTTP connection once its handshake is done."""

    def __init__(
        self, config: HttpServerConfig, server_state: ServerState, app_state: dict[str, Any], handshake: Handshake
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._handshake = handshake

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._handshake.end()
        super().connection_made(transport)
