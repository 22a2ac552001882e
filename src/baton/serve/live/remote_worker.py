"""A worker of another host, as the server holds it: a name on that host's connection."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from baton.core.messages import WorkerCommand
from baton.core.types import WorkerView
from baton.serve.messages.hosting import ForWorker

_encoder = msgspec.msgpack.Encoder()


class RemoteWorker:
    """Implements `WorkerLink`."""

    def __init__(self, view: WorkerView, put: Callable[[ForWorker], None]) -> None:
        self.view = view
        self.state = "starting"
        self.pid = 0
        self._put = put

    def send(self, message: WorkerCommand) -> None:
        """See `WorkerLink.send`."""
        self._put(ForWorker(self.view.id, _encoder.encode(message)))
