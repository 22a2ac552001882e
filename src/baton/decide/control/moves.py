"""Moves of decoding requests: those that the policy asks for, and those that leave a draining worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.core.messages import AheadEnded, CoordinatorCommand, RetireWorker, SendAhead, StopRequest
from baton.core.types import FlightView, RequestId, WorkerId
from baton.decide.control.fleet import Fleet
from baton.decide.control.flight import Flight


@dataclass(frozen=True, slots=True)
class Moves:
    """Begins moves. A request continues on its target once its worker has dropped it."""

    fleet: Fleet
    flights: Mapping[RequestId, Flight]

    def movable(self) -> list[FlightView]:
        """Return the requests that a policy may move: they decode, do not move, and their worker does not drain."""
        return [
            FlightView(request=flight.request, worker=flight.worker, started_at_s=flight.started_at_s)
            for flight in self.flights.values()
            if flight.worker is not None and flight.worker in self.fleet and _is_movable(flight)
        ]

    def retire_drained(self) -> list[CoordinatorCommand]:
        """Remove the draining workers that have no request left from the fleet. Return the commands that end them."""
        if not self.fleet.draining:
            return []
        busy = {flight.worker for flight in self.flights.values()}
        drained = [worker for worker in self.fleet.draining if worker not in busy]
        for worker in drained:
            self.fleet.leave(worker)
        return [RetireWorker(worker) for worker in drained]

    def draining_requests(self) -> int:
        """Return the number of requests on draining workers."""
        draining = self.fleet.draining
        return sum(flight.worker in draining for flight in self.flights.values()) if draining else 0

    def on_draining(self) -> Sequence[Flight]:
        """Return the decoding requests on draining workers that do not move yet."""
        draining = self.fleet.draining
        if not draining:
            return ()
        return [flight for flight in self.flights.values() if flight.worker in draining and _is_movable(flight)]

    def begin(self, request_id: RequestId, target: WorkerId) -> list[CoordinatorCommand]:
        """Begin to move a request. On its own host it is stopped at once; else its KV is sent ahead first."""
        flight = self.flights.get(request_id)
        if flight is None or not _is_movable(flight) or flight.worker in (None, target):
            return []
        flight.moving_to = target
        if flight.host is None or flight.host == self.fleet.view(target).host:
            return [StopRequest(request_id, flight.attempt, flight.worker)]
        return [SendAhead(flight.request, flight.attempt, flight.host, target, report=True)]

    def stop(self, event: AheadEnded) -> list[CoordinatorCommand]:
        """Stop a moving request after most of its KV was sent ahead. If that failed, the request stays."""
        flight = self.flights.get(event.request_id)
        if flight is None or flight.moving_to is None or flight.attempt != event.attempt or flight.worker is None:
            return []
        if not event.landed:
            flight.moving_to = None
            return []
        return [StopRequest(event.request_id, flight.attempt, flight.worker)]


def _is_movable(flight: Flight) -> bool:
    return flight.stage == "decode" and flight.moving_to is None
