"""The shape of the fleet over time: roles that flip, workers that are started and retired, as the policies ask."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.control.advice import Policies
from baton.core.messages import CoordinatorCommand, RetireWorker, SetRole, StartWorker
from baton.core.types import ROLES, ClusterView, FlightView, LoadWindow, RequestId, Role, WorkerId, WorkerView

HISTORY_WINDOWS_MAX = 4096
"""A little over an hour at one window a second; older ones are forgotten (INV-9)."""


@dataclass(slots=True)
class Reshaping:
    """Turns what roles and scaling want into commands. The coordinator applies them to its fleet."""

    history: deque[LoadWindow] = field(default_factory=lambda: deque[LoadWindow](maxlen=HISTORY_WINDOWS_MAX))
    starting: dict[Role, int] = field(default_factory=dict[Role, int])
    """Workers that were asked for and have not joined."""
    failure: str = ""
    """How a policy of these families last failed. The shape then stays as it is."""

    def tick(
        self, window: LoadWindow, cluster: ClusterView, policies: Policies, now_s: float
    ) -> list[CoordinatorCommand]:
        """Look at roles, then at the size of the fleet."""
        self.history.append(window)
        try:
            roles = policies.roles.assign(cluster, self.history, policies.cost, now_s)
            target = policies.scaling.target(cluster, self.history, policies.cost, now_s)
        except Exception as error:  # noqa: BLE001  a user's policy may raise anything
            names = f"{type(policies.roles).__name__} or {type(policies.scaling).__name__}"
            self.failure = f"the policy {names} failed: {type(error).__name__}: {error}"
            return []
        return [*_flips(roles, cluster), *self._resize(target, cluster)]

    def moves(
        self, cluster: ClusterView, flights: Sequence[FlightView], policies: Policies, now_s: float
    ) -> dict[RequestId, WorkerId]:
        """Ask which requests go on elsewhere. Names of workers that are not there are left out."""
        try:
            wanted = policies.moves.moves(cluster, flights, policies.cost, now_s)
        except Exception as error:  # noqa: BLE001  a user's policy may raise anything
            self.failure = f"the policy {type(policies.moves).__name__} failed: {type(error).__name__}: {error}"
            return {}
        known = {worker.id for worker in cluster.workers}
        return {request: worker for request, worker in sorted(wanted.items()) if worker in known}

    def joined(self, role: Role) -> None:
        """Note that one more worker is there."""
        left = self.starting.get(role, 0) - 1
        if left > 0:
            self.starting[role] = left
        else:
            self.starting.pop(role, None)

    def _resize(self, target: Mapping[Role, int], cluster: ClusterView) -> list[CoordinatorCommand]:
        """Start what is missing; retire idle workers of what is too many. Never the last worker of the cluster."""
        commands: list[CoordinatorCommand] = []
        live = Counter(worker.role for worker in cluster.workers)
        for role in ROLES:
            wanted = target.get(role)
            if wanted is None:
                continue
            missing = wanted - live[role] - self.starting.get(role, 0)
            if missing > 0:
                self.starting[role] = self.starting.get(role, 0) + missing
                commands += [StartWorker(role)] * missing
            commands += _retirements(cluster, role, max(0, live[role] - max(wanted, 0)))
        retired = [command for command in commands if isinstance(command, RetireWorker)]
        if retired and len(retired) == len(cluster.workers):
            commands.remove(retired[-1])
        return commands


def _flips(roles: Mapping[WorkerId, Role], cluster: ClusterView) -> list[CoordinatorCommand]:
    known = {worker.id: worker.role for worker in cluster.workers}
    return [
        SetRole(worker, role)
        for worker, role in sorted(roles.items())
        if worker in known and role in ROLES and known[worker] != role
    ]


def _retirements(cluster: ClusterView, role: Role, surplus: int) -> list[CoordinatorCommand]:
    def idle(worker: WorkerView) -> bool:
        return worker.role == role and not worker.running_requests and not worker.queued_requests

    leaving = [worker.id for worker in reversed(cluster.workers) if idle(worker)][:surplus]
    return [RetireWorker(worker) for worker in leaving]
