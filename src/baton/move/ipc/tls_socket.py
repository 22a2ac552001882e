"""A blocking socket whose bytes pass through TLS in memory.

Python's own `SSLSocket` makes several system calls for each record of 16 KiB. This one sends and receives many
records at a time, and keeps the time limits of the kernel.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Buffer

_WIRE_BYTES = 256 << 10
"""Bytes that are encrypted before they are sent, and maximum bytes that one system call receives."""


class TlsSocket(socket.socket):
    """Encrypts everything that it sends. One thread at a time may use it; `shutdown` may be called by any."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        """Replace `connection`. `handshake` must follow."""
        super().__init__(fileno=connection.detach())
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._received = memoryview(bytearray(_WIRE_BYTES))

    def handshake(self) -> None:
        """Agree on keys with the other end. Raises OSError, SSLCertVerificationError among others."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                if not self._receive():
                    raise ConnectionResetError("the other side hung up during the TLS handshake") from None
            except ssl.SSLError:
                with suppress(OSError):
                    self._flush()  # the alert tells the other end why
                raise
        self._flush()

    def sendall(self, data: Buffer, flags: int = 0, /) -> None:
        self.sendmsg([data])

    def send(self, data: Buffer, flags: int = 0, /) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: Iterable[Buffer], *_: object) -> int:
        """Send all buffers. Return the number of their bytes."""
        sent_bytes = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            for start in range(0, view.nbytes, _WIRE_BYTES):
                self._tls.write(view[start : start + _WIRE_BYTES])
                if self._outgoing.pending >= _WIRE_BYTES:
                    self._flush()
            sent_bytes += view.nbytes
        self._flush()
        return sent_bytes

    def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        while True:
            try:
                return int(self._tls.read(nbytes or view.nbytes, view))  # a number, other than its type says
            except ssl.SSLWantReadError:
                if not self._receive():
                    return 0

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        data = bytearray(bufsize)
        return bytes(data[: self.recv_into(data)])

    def recvmsg_into(self, buffers: Iterable[Buffer], *_: object) -> tuple[int, list[Any], int, Any]:
        """Fill all buffers, unless the stream ends before."""
        received_bytes = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            while view:
                count = self.recv_into(view)
                if not count:
                    return received_bytes, [], 0, None
                received_bytes += count
                view = view[count:]
        return received_bytes, [], 0, None

    def _flush(self) -> None:
        if self._outgoing.pending:
            super().sendall(self._outgoing.read())

    def _receive(self) -> int:
        """Receive encrypted bytes. Return their number. 0: the stream has ended."""
        count = super().recv_into(self._received)
        self._incoming.write(self._received[:count])
        return count
