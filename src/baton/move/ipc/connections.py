"""Blocking sockets: a listener with one thread per connection, and transfers between sockets and memory.

A thread per connection costs nothing while it is idle, and moves bytes inside the kernel without Python's lock.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

_BACKLOG = 128
_ACCEPT_RETRY_S = 0.1
"""Pause after a failed `accept`. The end of a connection ends it early."""
_VIEWS_MAX = 1024
"""Maximum number of buffers in one system call (IOV_MAX of Linux)."""


class ConnectionServer:
    """Accept connections until it is closed, and serve each in a thread of its own."""

    def __init__(
        self,
        listening: socket.socket,
        serve: Callable[[socket.socket], None],
        connections_max: int,
        *,
        full: Callable[[socket.socket], None],
    ) -> None:
        """`serve` handles one connection until it returns or raises OSError. `full` handles one beyond the limit."""
        self._listening = listening
        self._serve = serve
        self._connections_max = connections_max
        self._full = full
        self._changed = threading.Condition()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        listening.listen(_BACKLOG)
        self._accepting = threading.Thread(target=self._accept, name="baton-accept", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Close every connection. No thread is left when this returns."""
        with self._changed:
            self._closed = True
            threads = list(self._open.values())
            for connection in self._open:
                hang_up(connection)
        hang_up(self._listening)
        self._accepting.join()
        self._listening.close()
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if self._closed:
                    return
                self._wait_for_room()  # the client has gone, or this process has no file descriptor left
                continue
            if not self._start(connection):
                connection.close()

    def _start(self, connection: socket.socket) -> bool:
        with self._changed:
            if self._closed:
                return False
            if len(self._open) >= self._connections_max:
                self._full(connection)
                return False
            thread = threading.Thread(target=self._answer, args=(connection,), name="baton-answer", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system cannot start another thread
                self._full(connection)
                return False
            self._open[connection] = thread
        return True

    def _wait_for_room(self) -> None:
        with self._changed:
            self._changed.wait(_ACCEPT_RETRY_S)

    def _answer(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        except OSError:
            pass  # the client sees the closed connection and connects again
        finally:
            connection.close()
            with self._changed:
                del self._open[connection]
                self._changed.notify_all()


def hang_up(connection: socket.socket) -> None:
    """Shut a connection down, which wakes every thread that waits on it. Harmless if it is closed already."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


@contextmanager
def hang_up_after(connection: socket.socket, limit_s: float) -> Iterator[None]:
    """Hang up if the body takes longer. `limit_waits` does not end a client that sends byte after byte."""
    timer = threading.Timer(limit_s, hang_up, [connection])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def limit_waits(connection: socket.socket, *, receive_s: float, send_s: float) -> None:
    """Limit the time that a call waits without progress. The kernel enforces it: Python's timeouts cost extra polls."""
    for option, limit_s in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6)))


def send_views(connection: socket.socket, views: Sequence[bytes | memoryview]) -> None:
    """Send bytes from several memories in order, without joining them first. Raises OSError."""
    rest = [memoryview(view).cast("B") for view in views if len(view)]
    at = 0
    while at < len(rest):
        at = _skip(rest, at, connection.sendmsg(rest[at : at + _VIEWS_MAX]))


def receive_views(connection: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill several memories in order, straight from the socket. Raises OSError, also if the stream ends before."""
    rest = [view for view in views if len(view)]
    at = 0
    while at < len(rest):
        try:
            received = connection.recvmsg_into(rest[at : at + _VIEWS_MAX], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:  # the limit of `limit_waits`
            raise TimeoutError("no bytes came in time") from None
        if received == 0:
            raise ConnectionResetError("the other side closed the connection in the middle of a message")
        at = _skip(rest, at, received)


def _skip(views: list[memoryview], at: int, moved_bytes: int) -> int:
    """Return the index of the first view that is not done. Cut it if a part of it was moved."""
    while at < len(views) and moved_bytes >= views[at].nbytes:
        moved_bytes -= views[at].nbytes
        at += 1
    if moved_bytes:
        views[at] = views[at][moved_bytes:]
    return at
