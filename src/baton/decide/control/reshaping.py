"""Changes of the fleet that policies ask for: role flips, starts and retirements of workers, moves of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from baton.core.messages import CoordinatorCommand, RetireWorker, SetRole, StartWorker
from baton.core.types import ROLES, ClusterView, FlightView, LoadWindow, RequestId, Role, WorkerId, WorkerView
from baton.decide.control.advice import Policies, PolicyFailure, asked
from baton.decide.control.load_history import LoadHistory

START_AGAIN_S = 10.0
"""Back-off after a failed start: its cause seldom disappears at once."""


@dataclass(slots=True)
class Reshaping:
    """Turns the choices of the policies for roles and scaling into commands. The coordinator applies them."""

    history: LoadHistory = field(default_factory=LoadHistory)
    failure: str = ""
    """Error message of the last failure of such a policy. After a failure the fleet stays as it is."""
    _starting: dict[WorkerId, Role] = field(default_factory=dict[WorkerId, Role])
    """Requested workers that have neither joined nor failed."""
    _started: int = 0
    """Number of workers ever requested. It makes their names unique."""
    _again_s: float = 0.0
    """Time before which no worker is requested."""

    @property
    def starting(self) -> dict[Role, int]:
        """Number of requested workers that have not joined, by role."""
        return dict(Counter(self._starting.values())) if self._starting else {}

    def tick(
        self, window: LoadWindow, cluster: ClusterView, policies: Policies, now_s: float
    ) -> list[CoordinatorCommand]:
        """Ask the policies for roles and then, with those roles, for the size of the fleet. Return the commands."""
        self.history.append(window)
        roles, scaling, cost = policies.roles, policies.scaling, policies.cost
        flips = asked(roles, lambda: _flips(roles.assign(cluster, self.history, cost, now_s), cluster))
        if isinstance(flips, PolicyFailure):
            self.failure = flips.reason
            return []
        flipped = _flipped(cluster, flips)
        target = asked(scaling, lambda: scaling.target(flipped, self.history, cost, now_s))
        if isinstance(target, PolicyFailure):
            self.failure = target.reason
            return []
        return [*flips, *self._resize(target, flipped, now_s)]

    def moves(
        self, cluster: ClusterView, flights: Sequence[FlightView], policies: Policies, now_s: float
    ) -> dict[RequestId, WorkerId]:
        """Return the requests to move, with their target workers. Unknown workers are left out."""
        wanted = asked(policies.moves, lambda: policies.moves.moves(cluster, flights, policies.cost, now_s))
        if isinstance(wanted, PolicyFailure):
            self.failure = wanted.reason
            return {}
        known = {worker.id for worker in cluster.workers}
        return {request: worker for request, worker in sorted(wanted.items()) if worker in known}

    def joined(self, worker: WorkerId) -> None:
        """Record that a worker has joined, whether it was requested or not."""
        self._starting.pop(worker, None)

    def lost(self, worker: WorkerId, now_s: float) -> None:
        """Record that a worker is lost. If it was requested and never joined, its start has failed: back off."""
        if self._starting.pop(worker, None) is not None:
            self._again_s = now_s + START_AGAIN_S

    def _resize(self, target: Mapping[Role, int], cluster: ClusterView, now_s: float) -> list[CoordinatorCommand]:
        """Start missing workers, and retire surplus idle ones. Never retire the last worker of the cluster."""
        commands: list[CoordinatorCommand] = []
        live, starting = Counter(worker.role for worker in cluster.workers), self.starting
        for role in ROLES:
            wanted = target.get(role)
            if wanted is None:
                continue
            if now_s >= self._again_s:
                commands += self._starts(role, wanted - live[role] - starting.get(role, 0))
            commands += _retirements(cluster, role, max(0, live[role] - max(wanted, 0)))
        retired = [command for command in commands if isinstance(command, RetireWorker)]
        if retired and len(retired) == len(cluster.workers):
            commands.remove(retired[-1])
        return commands

    def _starts(self, role: Role, missing: int) -> list[StartWorker]:
        commands: list[StartWorker] = []
        for _ in range(missing):
            self._started += 1
            worker = WorkerId(f"{role}-added-{self._started}")
            self._starting[worker] = role
            commands.append(StartWorker(worker, role))
        return commands


def _flips(roles: Mapping[WorkerId, Role], cluster: ClusterView) -> list[SetRole]:
    known = {worker.id: worker.role for worker in cluster.workers}
    return [
        SetRole(worker, role)
        for worker, role in sorted(roles.items())
        if worker in known and role in ROLES and known[worker] != role
    ]


def _flipped(cluster: ClusterView, flips: Sequence[SetRole]) -> ClusterView:
    """Return the cluster with the new roles of these workers."""
    roles = {flip.worker: flip.role for flip in flips}
    workers = tuple(
        replace(worker, role=roles[worker.id]) if worker.id in roles else worker for worker in cluster.workers
    )
    return replace(cluster, workers=workers) if flips else cluster


def _retirements(cluster: ClusterView, role: Role, surplus: int) -> list[CoordinatorCommand]:
    def idle(worker: WorkerView) -> bool:
        return worker.role == role and not worker.running_requests and not worker.queued_requests

    leaving = [worker.id for worker in reversed(cluster.workers) if idle(worker)][:surplus]
    return [RetireWorker(worker) for worker in leaving]
