"""The interfaces between a host's workers and the server: commands to a worker, and events of the workers.

The server implements them for its own host. On another host, the agent forwards both over its connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton.core.messages import StartWorker, WorkerCommand, WorkerFailed, WorkerProgress, WorkerReady
from baton.core.types import HostId, WorkerId, WorkerView
from baton.serve.messages.setup import Pong

WorkerMessage = WorkerReady | WorkerProgress | WorkerFailed | Pong
"""Messages of a worker that its supervisor handles, instead of the driver."""


class WorkerLink(Protocol):
    """Sends commands to one worker, on this host or another."""

    view: WorkerView
    state: str
    pid: int
    attention_backend: str
    """Name of its attention backend. Empty: unknown, or its engine has no attention."""

    def send(self, message: WorkerCommand) -> None:
        """Send a command. It is dropped if the worker has died: the loss is reported separately."""
        ...


class WorkerListener(Protocol):
    """Receives the events of one host's workers from their supervisor."""

    def add(self, link: WorkerLink) -> None:
        """Register a worker that is being started."""
        ...

    def join(self, link: WorkerLink) -> None:
        """Note that a worker is ready for requests."""
        ...

    def lose(self, worker: WorkerId, reason: str) -> None:
        """Note that a worker's process is dead. A new one may follow under the same name."""
        ...

    def retire(self, worker: WorkerId, reason: str) -> None:
        """Remove a worker for good: scaling has ended it, or it was added by scaling and cannot be kept alive."""
        ...

    def receive(self, worker: WorkerId, payload: bytes) -> WorkerMessage | None:
        """Handle an encoded message of a worker. If its supervisor must handle it, return it decoded."""
        ...


class EngineHosts(Protocol):
    """Servers of another inference engine. Each takes the place of a host with one worker."""

    @property
    def joined(self) -> int:
        """Number of servers that take requests."""
        ...

    @property
    def can_serve(self) -> bool:
        """Return whether the servers that take requests have every role that a request needs."""
        ...

    @property
    def failure(self) -> str:
        """Return the reason why no server can be kept running. Empty: enough of them can."""
        ...

    async def start(self, changed: Callable[[], None]) -> None:
        """Begin to check the servers. `changed` is called after each server that was found, lost or given up."""
        ...

    async def stop(self) -> None:
        """End all requests to the servers."""
        ...


class HostLauncher(Protocol):
    """Starts hosts of a server on other machines, and starts them again if they are lost."""

    async def start(self, url: str, lost: Callable[[WorkerId, str], None]) -> None:
        """Start the configured hosts, which join the server at `url`. Raises ConfigError if that is impossible.

        `lost` gets each worker of `launch` whose host is given up, with the reason.
        """
        ...

    def launch(self, command: StartWorker) -> None:
        """Start a host of the command's name, with the one worker."""
        ...

    def retire(self, host: HostId) -> bool:
        """Do not start this host again after its end. Return False if it was not started here."""
        ...

    async def stop(self) -> None:
        """End every host that was started."""
        ...
