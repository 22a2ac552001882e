"""How long requests wait for a worker while none is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from baton.core.ticking import WaitedTooLong
from baton.core.types import WorkerId
from baton.decide.control.carrier import Carrier
from baton.move.clock import now_s
from baton.serve.host.worker_link import WorkerLink


class RoomWatch:
    """Tells the coordinator when the first of those that wait has waited for too long. One timer for all of them."""

    def __init__(
        self, carrier: Carrier, links: Mapping[WorkerId, WorkerLink], *, wait_s: float, start_s: float
    ) -> None:
        """`wait_s`: how long a request may wait. `start_s`: how much longer while some worker starts."""
        self.is_host_coming: Callable[[], bool] = lambda: False
        """Some host has begun to join, and has not named its workers yet."""
        self._carrier = carrier
        self._links = links
        self._wait_s, self._start_s = wait_s, start_s
        self._timer: asyncio.TimerHandle | None = None

    def look(self) -> None:
        """Set the timer anew: a request may have come to wait, or whom it waits for may not come any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        since_s = self._carrier.coordinator.waiting_since_s
        if since_s is not None:
            limit_s = self._limit_s()
            left_s = max(0.0, since_s + limit_s - now_s())
            self._timer = asyncio.get_running_loop().call_later(left_s, self._turn_away, limit_s)

    def _limit_s(self) -> float:
        starts = self.is_host_coming() or any(link.state == "starting" for link in self._links.values())
        return self._wait_s + self._start_s if starts else self._wait_s

    def _turn_away(self, limit_s: float) -> None:
        if limit_s == self._limit_s():
            self._carrier.tell(WaitedTooLong(limit_s), now_s())
        self.look()
