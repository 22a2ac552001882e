"""The workers on the server's own host, as their supervisor reports them."""

from __future__ import annotations

import msgspec

from baton.core.copies import LayersDone
from baton.core.messages import StepReport
from baton.core.types import WorkerId
from baton.serve.host.worker_link import WorkerLink, WorkerMessage
from baton.serve.live.driver import Driver
from baton.serve.messages.setup import FromWorkerMessage


class OwnWorkers:
    """Passes the reports of the workers on the server's own host to the driver. Implements `WorkerListener`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._ready: set[WorkerId] = set()
        self._decoder = msgspec.msgpack.Decoder(FromWorkerMessage)

    def add(self, link: WorkerLink) -> None:
        self._driver.links[link.view.id] = link

    def join(self, link: WorkerLink) -> None:
        self._ready.add(link.view.id)
        self._driver.join(link)

    def lose(self, worker: WorkerId, reason: str) -> None:
        if worker in self._ready:
            self._ready.discard(worker)
            self._driver.lose(worker, reason)

    def retire(self, worker: WorkerId, reason: str) -> None:
        self._ready.discard(worker)
        self._driver.lose(worker, reason)
        del self._driver.links[worker]

    def receive(self, worker: WorkerId, payload: bytes) -> WorkerMessage | None:
        message = self._decoder.decode(payload)
        if isinstance(message, StepReport | LayersDone):
            self._driver.apply_report(message)
            return None
        return message
