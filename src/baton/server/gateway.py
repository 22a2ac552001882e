"""The cluster as one object, for the HTTP half of the server. Deciding and driving are the driver's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from baton.core.errors import RequestError
from baton.core.messages import CloseRequest
from baton.core.types import Request, Role, Slo, WorkerId
from baton.engine.card import ModelCard
from baton.host.port import WorkerLink
from baton.server.driver import Driver
from baton.server.live_request import LiveRequest
from baton.server.port import ClusterStatus, HostStatus, WorkerStatus


class LiveGateway:
    """Implements `Gateway` over worker processes of one host."""

    def __init__(self, card: ModelCard, driver: Driver, *, policy_names: dict[str, str], slo: Slo | None) -> None:
        self.card = card
        self.state = "loading"
        self._driver = driver
        self._policy_names = policy_names
        self._slo = slo

    @property
    def request_tokens_max(self) -> int:
        """See `Gateway.request_tokens_max`."""
        return min(self.card.context_tokens, self._driver.pool.view().blocks_total * self._driver.layout.block_tokens)

    def submit(self, request: Request, prompt: Sequence[int]) -> LiveRequest:
        """See `Gateway.submit`."""
        if request.slo is None and self._slo is not None:
            request = msgspec.structs.replace(request, slo=self._slo)
        if self.state == "stopping":
            why = "the server is shutting down; send the request again to another one, or later"
            refused = CloseRequest(request.id, "rejected", why, "shutdown", 1.0)
            return self._driver.refuse(request, prompt, refused)
        return self._driver.submit(request, prompt)

    def set_role(self, worker: WorkerId, role: Role) -> None:
        """See `Gateway.set_role`."""
        link = self._driver.links.get(worker)
        if link is None:
            known = ", ".join(sorted(self._driver.links)) or "none"
            raise RequestError(f"there is no worker {worker!r}; known: {known}", param="id", status=404)
        if link.view.role != role:
            self._driver.set_role(link, role)

    def cluster(self) -> ClusterStatus:
        """See `Gateway.cluster`."""
        host = self._driver.pool.view()
        return ClusterStatus(
            workers=tuple(self._status(link, host.blocks_total) for link in self._driver.links.values()),
            hosts=(
                HostStatus(
                    id=host.id,
                    kv_blocks_total=host.blocks_total,
                    kv_blocks_free=host.blocks_free,
                    kv_blocks_used=host.blocks_used,
                    kv_blocks_cached=host.blocks_cached,
                    kv_block_tokens=self._driver.layout.block_tokens,
                    kv_block_bytes=self._driver.layout.block_bytes,
                ),
            ),
            policy=self._policy_names,
        )

    def _status(self, link: WorkerLink, blocks_total: int) -> WorkerStatus:
        view = link.view
        return WorkerStatus(
            id=view.id,
            role=view.role,
            pid=link.pid,
            state=link.state,
            running=view.running_requests,
            waiting=view.waiting_requests,
            kv_blocks_used=self._driver.pool.blocks_of(view.id),
            kv_blocks_total=blocks_total,
        )

    # ---- what the service asks

    def stop(self, on_quiet: Callable[[], None]) -> None:
        """Refuse what comes from now on; call back once nothing is running any more."""
        self.state = "stopping"

        def check_quiet() -> None:
            if not self._driver.live:
                on_quiet()

        self._driver.outside.on_close = check_quiet
        check_quiet()

    def cancel_all(self) -> None:
        """Give up what is still running."""
        for live in list(self._driver.live.values()):
            live.cancel()
