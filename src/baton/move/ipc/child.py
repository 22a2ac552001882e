"""Child processes: the socket to the parent, and the end of the child when its parent dies."""

from __future__ import annotations

import ctypes
import logging
import signal
import socket
import sys

from baton.core.errors import WorkerError
from baton.decide.control.message_order import MessageLostError
from baton.move.ipc.frames import ControlReader, ControlWriter

log = logging.getLogger("baton.worker")

_RECEIVE_BYTES = 256 * 1024
_DESCRIPTORS_MAX = 3
"""A worker gets those of the arena, of the spill space and of the file for its weights."""
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, so that no process is left after a crash (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ParentSocket:
    """Blocking Unix socket to the parent process, with framed messages.

    It is `closed` once the parent is gone or one of its messages was lost: then this process ends and a new one starts.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.closed = False
        self._sock = sock
        self._reader = ControlReader()
        self._writer = ControlWriter()
        self._early: list[bytes] = []

    def receive_first(self) -> tuple[bytes, list[int]]:
        """Wait for the first message. Return it with the attached descriptors, at least one.

        Raises WorkerError if the parent hangs up before, or if it attaches more than 3 descriptors.
        """
        data, descriptors, flags, _address = socket.recv_fds(self._sock, _RECEIVE_BYTES, _DESCRIPTORS_MAX)
        if flags & socket.MSG_CTRUNC:
            raise WorkerError(f"the parent attached more than {_DESCRIPTORS_MAX} descriptors to the setup")
        payloads = list(self._reader.feed(data))
        while data and not payloads:
            data = self._sock.recv(_RECEIVE_BYTES)
            payloads = list(self._reader.feed(data))
        if not payloads or not descriptors:
            raise WorkerError("the parent hung up before it sent the setup")
        first, *self._early = payloads
        return first, descriptors

    def receive(self, *, wait: bool) -> list[bytes] | None:
        """Return the messages that have arrived, or None. With `wait`, block until there are bytes."""
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
        try:
            return list(self._reader.feed(data))
        except MessageLostError as error:
            log.error("%s; this process ends, and a new one takes its place", error)
            self.closed = True
            return []

    def put(self, payload: bytes) -> None:
        """Send a message. If the parent is gone, the socket becomes closed."""
        try:
            self._sock.sendall(self._writer.frame(payload))
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True
