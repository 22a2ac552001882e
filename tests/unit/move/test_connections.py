"""The connection server: a bounded number of connections, each served by its own thread."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress

from baton.move.ipc.connections import ConnectionServer


def echo(connection: socket.socket) -> None:
    while said := connection.recv(10):
        connection.sendall(said)


def test_one_too_many_is_told_so_and_one_that_ends_makes_room() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    address = listening.getsockname()
    listener = ConnectionServer(listening, echo, 2, full=lambda connection: connection.sendall(b"full"))
    with ExitStack() as stack:
        first, second = (stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(2))
        for connection in (first, second):
            connection.sendall(b"there")
            assert connection.recv(10) == b"there"
        late = stack.enter_context(socket.create_connection(address, timeout=30))
        assert (late.recv(10), late.recv(10)) == (b"full", b"")
        first.close()
        for _ in range(10_000):  # until the thread of the first has noticed
            with suppress(ConnectionError), socket.create_connection(address, timeout=30) as again:
                again.sendall(b"again")
                if again.recv(10) == b"again":
                    break
        else:
            raise AssertionError("nobody else was served")
        listener.close()
        assert second.recv(10) == b"", "it is hung up on"
