"""One worker process as its host holds it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from baton.core.types import WorkerView
from baton.serve.host.child_process import ChildProcess
from baton.serve.messages.setup import ToWorkerMessage, WorkerSetup


class WorkerProcess(ChildProcess):
    """Implements `WorkerLink`. Started once; a restarted worker is a new one."""

    def __init__(self, view: WorkerView, *, heard: Callable[[bytes], None], said: Callable[[str], None]) -> None:
        super().__init__(view.id, "baton.serve.worker", heard=heard, said=said)
        self.view = view
        self.state = "starting"
        self._encoder = msgspec.msgpack.Encoder()

    async def begin(self, setup: WorkerSetup, arena_fd: int) -> None:
        """Start it. See `ChildProcess.start`."""
        await self.start(self._encoder.encode(setup), arena_fd, threads=setup.threads)

    def send(self, message: ToWorkerMessage) -> None:
        """See `WorkerLink.send`."""
        self.pass_on(self._encoder.encode(message))
