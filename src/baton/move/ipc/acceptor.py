"""Accept TCP connections on an event loop.

It replaces the listeners of event loops, for two reasons. Without a free file descriptor, those close connections or
retry without a pause. They also report a TLS connection only after its handshake, but limits have to count it before.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Coroutine
from typing import Protocol

from baton.move.clock import now_s

ACCEPT_RETRY_S = 1.0
"""Pause after a connection could not be accepted, such as for too many open files."""
LOG_S = 60.0
"""Minimum interval between two log lines about connections that cannot be accepted."""
BACKLOG = 1024
"""Connections that the system holds until they are accepted."""

_ADVICE = {
    errno.EMFILE: "; raise the limit of this process: ulimit -Hn",
    errno.ENFILE: "; raise the limit of the system: sysctl fs.file-max",
}
"""End of the log line about a connection that cannot be accepted, by error number."""

log = logging.getLogger("baton.server")


class ConnectionReceiver(Protocol):
    """Opens the connections of an acceptor."""

    def receive(self, connection: socket.socket, address: str) -> Coroutine[None, None, None] | None:
        """Return the coroutine that opens a connection from this address. None: a limit was reached, it is closed."""
        ...


class Acceptor:
    """Accepts the connections of a listening socket until it is closed."""

    def __init__(self, listening: socket.socket, receiver: ConnectionReceiver) -> None:
        self._listening = listening
        self._receiver = receiver
        self._opening: set[asyncio.Task[None]] = set()
        """Bounded by the number of connections that the receiver allows."""
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._logged_s: float | None = None
        listening.setblocking(False)
        self._begin()

    async def close(self) -> None:
        """Accept no further connection, and end those that are being opened."""
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
        """Accept one connection per call, so that streams continue while many clients connect at once."""
        try:
            connection, peer = self._listening.accept()
        except (BlockingIOError, ConnectionError):
            return  # the client has gone
        except OSError as error:
            self._note(error)
            self._loop.remove_reader(self._listening)
            self._retry = self._loop.call_later(ACCEPT_RETRY_S, self._begin)
            return
        connection.setblocking(False)
        opening = self._receiver.receive(connection, peer[0])
        if opening is not None:
            task = asyncio.create_task(opening)
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _note(self, error: OSError) -> None:
        """Log that no connection can be accepted, unless it was logged recently."""
        if self._logged_s is None or now_s() - self._logged_s >= LOG_S:
            self._logged_s = now_s()
            log.warning("refused new connections for now: %s%s", error, _ADVICE.get(error.errno or 0, ""))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address. Raises OSError."""
    family, kind, protocol, _name, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening
