"""A listening socket and a blocking thread per connection: an idle one costs nothing, a busy one holds no lock."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable

_BACKLOG = 128
_FULL_S = 0.1
"""Until a refused `accept` is tried again, unless a connection ends before."""


class Listener:
    """Accepts connections until it is closed, each served by a thread of its own."""

    def __init__(
        self,
        listening: socket.socket,
        serve: Callable[[socket.socket], None],
        connections_max: int,
        *,
        full: Callable[[socket.socket], None],
    ) -> None:
        """`serve` answers one connection until it raises OSError or returns; `full` says no to one that is too many."""
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
        """Hang up on everybody. No thread is left when this returns."""
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
                self._wait_for_room()  # the one that wanted to connect is gone, or descriptors have run out
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
            except RuntimeError:  # the system has no room for another thread
                self._full(connection)
                return False
            self._open[connection] = thread
        return True

    def _wait_for_room(self) -> None:
        with self._changed:
            self._changed.wait(_FULL_S)

    def _answer(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        except OSError:
            pass  # whoever is at the other end notices, and comes again
        finally:
            connection.close()
            with self._changed:
                del self._open[connection]
                self._changed.notify_all()


def hang_up(connection: socket.socket) -> None:
    """End a connection, so that whoever waits on it wakes up. Harmless when it is over."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def limit_waits(connection: socket.socket, *, receive_s: float, send_s: float) -> None:
    """Let calls that move nothing for so long fail, in the kernel: a timeout of Python's costs a poll per call."""
    for option, limit_s in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6)))
