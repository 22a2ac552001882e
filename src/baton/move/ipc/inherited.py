"""A child's end of the Unix socket to the process that started it: blocking, framed, with a descriptor at the start."""

from __future__ import annotations

import socket

from baton.core.errors import WorkerError
from baton.move.ipc.frames import FrameReader, frame

_RECEIVE_BYTES = 256 * 1024


class InheritedSocket:
    """Payloads in and out. `closed` once the parent is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self.closed = False
        self._sock = sock
        self._reader = FrameReader()
        self._early: list[bytes] = []

    def receive_first(self) -> tuple[bytes, int]:
        """Wait for the first message. Returns it with the descriptor that came beside it.

        Raises WorkerError where the parent hung up before: end.
        """
        data, descriptors, _flags, _address = socket.recv_fds(self._sock, _RECEIVE_BYTES, 1)
        payloads = list(self._reader.feed(data))
        while data and not payloads:
            data = self._sock.recv(_RECEIVE_BYTES)
            payloads = list(self._reader.feed(data))
        if not payloads or len(descriptors) != 1:
            raise WorkerError("the parent hung up before it said what to do")
        first, *self._early = payloads
        return first, descriptors[0]

    def receive(self, *, wait: bool) -> list[bytes] | None:
        """Return what has come: with `wait`, block until something has. None where nothing has."""
        if self._early:
            early, self._early = self._early, []
            return early
        try:
            data = self._sock.recv(_RECEIVE_BYTES, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            data = b""
        self.closed = not data
        return list(self._reader.feed(data))

    def put(self, payload: bytes) -> None:
        """Send a message. A parent that is gone closes the socket."""
        try:
            self._sock.sendall(frame(payload))
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True
