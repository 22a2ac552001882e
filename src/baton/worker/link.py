"""The worker's end of the socket to its server: blocking, one thread, no polling."""

from __future__ import annotations

import socket

import msgspec

from baton.core.errors import WorkerError
from baton.core.messages import WorkerCommand
from baton.core.types import WorkerId
from baton.link.frames import FrameReader, frame
from baton.link.setup import FromWorkerMessage, Ping, Pong, ToWorkerMessage, WorkerSetup

_RECEIVE_BYTES = 256 * 1024


class ServerLink:
    """Commands in, reports out. `closed` once the server is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self.closed = False
        self._sock = sock
        self._reader = FrameReader()
        self._decoder = msgspec.msgpack.Decoder(ToWorkerMessage)
        self._encoder = msgspec.msgpack.Encoder()
        self._worker = WorkerId("")

    def receive_setup(self) -> tuple[WorkerSetup, int]:
        """Wait for the first message. Returns it with the arena's descriptor, which came beside it."""
        data, descriptors, _flags, _address = socket.recv_fds(self._sock, _RECEIVE_BYTES, 1)
        messages = list(self._reader.feed(data))
        while data and not messages:
            data = self._sock.recv(_RECEIVE_BYTES)
            messages = list(self._reader.feed(data))
        setup = self._decoder.decode(messages[0]) if messages else None
        if not isinstance(setup, WorkerSetup) or len(descriptors) != 1:
            raise WorkerError("the server hung up before it said what to do")
        self._worker = setup.view.id
        return setup, descriptors[0]

    def take(self, *, wait: bool) -> list[WorkerCommand]:
        """Return the commands that have come. With `wait`, block until at least one message is there."""
        commands: list[WorkerCommand] = []
        blocking = wait
        while not self.closed:
            try:
                data = self._sock.recv(_RECEIVE_BYTES, 0 if blocking else socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            self.closed = not data
            for payload in self._reader.feed(data):
                message = self._decoder.decode(payload)
                if isinstance(message, Ping):
                    self.put(Pong(self._worker))
                elif not isinstance(message, WorkerSetup):
                    commands.append(message)
            blocking = wait and not commands
        return commands

    def put(self, message: FromWorkerMessage) -> None:
        """Send a message. A server that is gone closes the link."""
        try:
            self._sock.sendall(frame(self._encoder.encode(message)))
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True
