"""Connections that cannot be accepted now wait until they can be."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Coroutine

import pytest

from baton.move.ipc import acceptor as module
from baton.move.ipc.acceptor import Acceptor, listen


class Received:
    """Keeps the first connection."""

    def __init__(self) -> None:
        self.connection: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()

    def receive(self, connection: socket.socket, address: str) -> Coroutine[None, None, None] | None:
        assert address == "127.0.0.1"
        self.connection.set_result(connection)
        return None


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EMFILE, "; raise the limit of this process: ulimit -Hn"),
        (errno.ENFILE, "; raise the limit of the system: sysctl fs.file-max"),
        (errno.ENOBUFS, ""),
    ],
)
def test_a_connection_waits_and_one_line_names_the_limit(
    number: int, advice: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, failures = socket.socket.accept, [OSError(number, "no")] * 3

    def accept_later(listening: socket.socket) -> object:
        if failures:
            raise failures.pop()
        return accept(listening)

    async def play() -> None:
        with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()) as client:
            received = Received()
            acceptor = Acceptor(listening, received)
            with await received.connection as accepted:
                assert accepted.getpeername() == client.getsockname()
            await acceptor.close()

    monkeypatch.setattr(module, "ACCEPT_RETRY_S", 0.001)
    monkeypatch.setattr(socket.socket, "accept", accept_later)
    with caplog.at_level(logging.WARNING, logger="baton.server"):
        asyncio.run(asyncio.wait_for(play(), 30))
    assert not failures
    assert [record.getMessage() for record in caplog.records] == [
        f"refused new connections for now: [Errno {number}] no{advice}"
    ]
