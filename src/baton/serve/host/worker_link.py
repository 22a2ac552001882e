"""Who is told what happens to a host's workers: the server's own driver, or an agent's connection to its server."""

from __future__ import annotations

from typing import Protocol

from baton.core.messages import WorkerCommand, WorkerFailed, WorkerProgress, WorkerReady
from baton.core.types import WorkerId, WorkerView
from baton.serve.messages.setup import Pong

WorkerNews = WorkerReady | WorkerProgress | WorkerFailed | Pong
"""What a worker says of itself, for whoever keeps it alive."""


class WorkerLink(Protocol):
    """A worker as whoever commands it sees it: somebody to send to."""

    view: WorkerView
    state: str
    pid: int

    def send(self, message: WorkerCommand) -> None:
        """Pass a message on. To a worker that has died it goes nowhere: its loss is reported on its own."""
        ...


class WorkerListener(Protocol):
    """Listens to the workers of one host, whom a supervisor keeps alive."""

    def add(self, link: WorkerLink) -> None:
        """Know of a worker that is being started."""
        ...

    def join(self, link: WorkerLink) -> None:
        """A worker is ready for work."""
        ...

    def lose(self, worker: WorkerId, reason: str) -> None:
        """A worker is certainly dead, ready or not. Another one may follow under its name."""
        ...

    def retire(self, worker: WorkerId, reason: str) -> None:
        """A worker has ended for good, and its name with it: nobody wants it, or it was added and cannot be kept up."""
        ...

    def hear(self, worker: WorkerId, payload: bytes) -> WorkerNews | None:
        """Take in what a worker has said, as it came over its socket. Returns what its supervisor is to act on."""
        ...
