"""Requests that wait for a slot in the batches of the decode workers before their prompts are computed.

Prefill workers can compute prompts faster than decode workers generate answers. Without this queue, the excess would
decode in turns, ever more slowly, and no request would ever wait long enough to be rejected.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from baton.core.types import Request, RequestId
from baton.decide.control.fleet import Fleet
from baton.decide.control.flight import Flight, in_order
from baton.decide.control.start_queue import StartQueue
from baton.decide.control.turn_queue import count_decode_slots


@dataclass(slots=True)
class DecodeSlotQueue:
    """Holds back the requests of a client that uses its share of the decode slots.

    Requests with a TTFT SLO up to the queue's deadline are not held back. The other choices of an HTTP request wait
    too, so that none begins before the first one, which may be rejected. Admission bounds the length of the queue.
    """

    queue: StartQueue
    _begun: dict[RequestId, int] = field(default_factory=dict[RequestId, int])
    """The client of each request that was sent to a worker and is not closed."""
    _by_client: Counter[int] = field(default_factory=Counter[int])
    """Number of these requests by client. Clients without any are left out."""
    waiting: dict[RequestId, Flight] = field(default_factory=dict[RequestId, Flight])
    _full_slots: float = 0.0
    """Number of decode slots at the last `give` that found no slot for a waiting request."""
    _has_ended: bool = False
    """True if a request has ended since then."""

    def has_to_wait(self, request: Request, fleet: Fleet) -> bool:
        """Return whether a request must wait. A request that has begun need not.

        A stream that began before a server restart waits only if its client uses as many slots as there are: the share
        of the client may have been larger then, but clients can also carry streams that never began.
        """
        wait_s_max, slo = self.queue.wait_s_max, request.slo
        if wait_s_max is None or (slo is not None and slo.ttft_s <= wait_s_max):
            return False
        if request.id in self._begun:
            return False
        if all(worker.role == "mixed" for worker in fleet.views()):
            return False  # they hold requests back themselves
        slots = count_decode_slots(fleet)
        if len(self._begun) < slots:
            return False
        clients = len(self._by_client) + (request.client not in self._by_client)
        share = slots if request.resumed_tokens else slots // clients
        return self._by_client[request.client] >= max(1, share)

    def overtaken(self, request: Request, fleet: Fleet) -> int:
        """Return the number of waiting requests that a new request overtakes."""
        return len(self.waiting) if self.waiting and not self.has_to_wait(request, fleet) else 0

    def put(self, flight: Flight) -> None:
        """Add a request that has to wait."""
        self.waiting[flight.request.id] = flight

    def give(self, fleet: Fleet) -> Flight | None:
        """Remove and return the next request that has a slot. None: no request has one."""
        slots = count_decode_slots(fleet)
        if slots == self._full_slots and not self._has_ended:
            return None
        able = [flight for flight in self.waiting.values() if not self.has_to_wait(flight.request, fleet)]
        if able:
            chosen = min(able, key=in_order)
            return self.waiting.pop(chosen.request.id)
        self._full_slots, self._has_ended = slots, False
        return None

    def drain(self) -> list[Flight]:
        """Remove and return all waiting requests."""
        flights = list(self.waiting.values())
        self.waiting.clear()
        return flights

    def begin(self, request: Request) -> None:
        """Record that a request is sent to a worker."""
        if request.id not in self._begun:
            self._begun[request.id] = request.client
            self._by_client[request.client] += 1

    def close(self, request_id: RequestId) -> None:
        """Remove a request that has ended."""
        self._has_ended = True
        self.waiting.pop(request_id, None)
        client = self._begun.pop(request_id, None)
        if client is not None:
            self._by_client[client] -= 1
            if not self._by_client[client]:
                del self._by_client[client]
