"""Moves of decoding requests: those that the policy asks for, and those that leave a draining worker. Restarts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.core.leaving import RestartWorker
from baton.core.messages import AheadEnded, CoordinatorCommand, RetireWorker, SendAhead, StopRequest
from baton.core.types import ClusterView, FlightView, HostId, RequestId, WorkerId
from baton.decide.control.advice import Policies, PolicyFailure
from baton.decide.control.fleet import Fleet
from baton.decide.control.flight import Flight


@dataclass(slots=True)
class RollingRestart:
    """Drains the next worker once the one before has joined again. `Moves` restarts a drained worker."""

    fleet: Fleet
    _left: list[WorkerId] = field(default_factory=list[WorkerId])

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """Workers that are to restart, or have not joined again yet."""
        return (*self.fleet.restarting, *self._left)

    def is_ending(self, worker: WorkerId) -> bool:
        """Return whether this worker was told to end, and has not joined again."""
        return worker in self.fleet.restarting and worker not in self.fleet.draining

    def want(self, workers: Sequence[WorkerId]) -> None:
        """Restart these workers. This replaces an earlier list, except for the worker that drains already."""
        for worker in [worker for worker in self.fleet.restarting if self.is_ending(worker)]:
            del self.fleet.restarting[worker]  # it may never come back
        self._left = [worker for worker in dict.fromkeys(workers) if worker not in self.fleet.restarting]

    def advance(self) -> list[RestartWorker]:
        """Drain the next worker, unless a restart is under way. Return the command for a worker that is alone.

        If no other worker can take its requests, it restarts at once: its requests wait for it and continue there.
        """
        while self._left and not self.fleet.restarting:
            worker = self._left.pop(0)
            if worker not in self.fleet:
                continue  # it was lost, and so restarts anyway, or it drains already
            self.fleet.restarting[worker] = self.fleet.view(worker).host
            if len(self.fleet.views()) == 1:
                self.fleet.leave(worker)
                return [RestartWorker(worker)]
            self.fleet.drain(worker)
        return []


@dataclass(frozen=True, slots=True)
class Moves:
    """Begins moves. A request continues on its target once its worker has dropped it."""

    fleet: Fleet
    flights: Mapping[RequestId, Flight]
    rolling: RollingRestart

    def need_ticks(self) -> bool:
        """Return whether a worker drains, or is to restart."""
        return bool(self.fleet.draining or self.rolling.workers)

    def forget_host(self, host: HostId) -> None:
        """Forget that a lost host wanted to leave, and that one of its workers restarts."""
        self.fleet.leaving.discard(host)
        for worker in [worker for worker, its_host in self.fleet.restarting.items() if its_host == host]:
            del self.fleet.restarting[worker]

    def roll(self) -> list[CoordinatorCommand]:
        """Retire or restart drained workers, and begin the next restart of a rolling one."""
        return [*self._end_drained(), *self.rolling.advance(), *self._end_drained()]

    def movable(self) -> list[FlightView]:
        """Return the requests that a policy may move: they decode, do not move, and their worker does not drain."""
        return [
            FlightView(request=flight.request, worker=flight.worker, started_at_s=flight.started_at_s)
            for flight in self.flights.values()
            if flight.worker is not None and flight.worker in self.fleet and _is_movable(flight)
        ]

    def drain_host(self, host: HostId) -> None:
        """Drain the workers of a leaving host."""
        self.fleet.leaving.add(host)
        for view in [view for view in self.fleet.views() if view.host == host]:
            self.fleet.drain(view.id)

    def left_hosts(self) -> list[HostId]:
        """Return the leaving hosts whose workers have no request left."""
        if not self.fleet.leaving:
            return []
        busy = self._busy()
        return sorted(self.fleet.leaving - {view.host for view in self.fleet.draining.values() if view.id in busy})

    def _end_drained(self) -> list[CoordinatorCommand]:
        """Retire or restart the draining workers that have no request left, except those of hosts that leave."""
        if not self.fleet.draining:
            return []
        busy, draining, leaving = self._busy(), self.fleet.draining.values(), self.fleet.leaving
        drained = [view.id for view in draining if view.id not in busy and view.host not in leaving]
        for worker in drained:
            self.fleet.leave(worker)
        restarting = self.fleet.restarting
        return [RestartWorker(worker) if worker in restarting else RetireWorker(worker) for worker in drained]

    def leave_draining(self, policies: Policies, cluster: ClusterView) -> list[CoordinatorCommand]:
        """Begin to move the decodes of draining workers to others."""
        commands: list[CoordinatorCommand] = []
        for flight in self._on_draining():
            candidates = cluster.having("decode") or cluster.workers
            target = policies.place(flight.request, flight.host, candidates, cluster) if candidates else None
            if target is not None and not isinstance(target, PolicyFailure):
                commands += self.begin(flight.request.id, target)
        return commands

    def _busy(self) -> set[WorkerId | None]:
        return {flight.worker for flight in self.flights.values()}

    def draining_requests(self) -> int:
        """Return the number of requests on draining workers."""
        draining = self.fleet.draining
        return sum(flight.worker in draining for flight in self.flights.values()) if draining else 0

    def _on_draining(self) -> Sequence[Flight]:
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
