"""The worker's end of the socket to its host. It blocks instead of polling; one thread receives, any thread sends."""

from __future__ import annotations

import socket
import threading

import msgspec

from baton.core.errors import WorkerError
from baton.core.messages import WorkerCommand
from baton.core.types import WorkerId
from baton.move.ipc.child import ParentSocket
from baton.serve.messages.setup import FromWorkerMessage, Ping, Pong, ToWorkerMessage, WorkerSetup


class ServerLink:
    """Receives commands and sends reports. `closed` is true once the host has closed the connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = ParentSocket(sock)
        self._decoder = msgspec.msgpack.Decoder(ToWorkerMessage)
        self._encoder = msgspec.msgpack.Encoder()
        self._putting = threading.Lock()
        self._worker = WorkerId("")

    @property
    def closed(self) -> bool:
        return self._socket.closed

    def receive_setup(self) -> tuple[WorkerSetup, list[int]]:
        """Wait for the first message. Return it with the descriptors of the arena and, if any, of the weights."""
        payload, descriptors = self._socket.receive_first()
        setup = self._decoder.decode(payload)
        if not isinstance(setup, WorkerSetup):
            raise WorkerError(
                f"the first message was a {type(setup).__name__}, not the setup; the server starts workers"
            )
        self._worker = setup.view.id
        return setup, descriptors

    def take(self, *, wait: bool) -> list[WorkerCommand]:
        """Return the commands that have arrived. With `wait`, block until there is at least one. Answer pings."""
        commands: list[WorkerCommand] = []
        blocking = wait
        while not self.closed:
            payloads = self._socket.receive(wait=blocking)
            if payloads is None:
                break
            for payload in payloads:
                message = self._decoder.decode(payload)
                if isinstance(message, Ping):
                    self.put(Pong(self._worker))
                elif not isinstance(message, WorkerSetup):
                    commands.append(message)
            blocking = wait and not commands
        return commands

    def put(self, message: FromWorkerMessage) -> None:
        """Send a message, from any thread. If the host is gone, the link becomes closed."""
        with self._putting:
            self._socket.put(self._encoder.encode(message))
