"""The workers of the server's own host: what they say goes to the driver, without a wire between."""

from __future__ import annotations

import msgspec

from baton.core.copies import LayersDone
from baton.core.messages import StepReport
from baton.core.types import WorkerId
from baton.serve.host.worker_link import WorkerLink, WorkerNews
from baton.serve.live.driver import Driver
from baton.serve.messages.setup import FromWorkerMessage


class OwnWorkers:
    """Implements `WorkerListener` for the supervisor of the server's own host."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._ready: set[WorkerId] = set()
        self._decoder = msgspec.msgpack.Decoder(FromWorkerMessage)

    def add(self, link: WorkerLink) -> None:
        """See `WorkerListener.add`."""
        self._driver.links[link.view.id] = link

    def join(self, link: WorkerLink) -> None:
        """See `WorkerListener.join`."""
        self._ready.add(link.view.id)
        self._driver.join(link)

    def lose(self, worker: WorkerId, reason: str) -> None:
        """See `WorkerListener.lose`."""
        if worker in self._ready:
            self._ready.discard(worker)
            self._driver.lose(worker, reason)

    def retire(self, worker: WorkerId, reason: str) -> None:
        """See `WorkerListener.retire`."""
        self._ready.discard(worker)
        self._driver.lose(worker, reason)
        del self._driver.links[worker]

    def hear(self, worker: WorkerId, payload: bytes) -> WorkerNews | None:
        """See `WorkerListener.hear`."""
        message = self._decoder.decode(payload)
        if isinstance(message, StepReport | LayersDone):
            self._driver.hear(message)
            return None
        return message
