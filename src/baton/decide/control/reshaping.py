"""Changes of the fleet that policies ask for: role flips, starts and retirements of workers, moves of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from msgspec.structs import replace

from baton.core.launching import ScalingRules
from baton.core.messages import RetireWorker, SetRole, StartWorker
from baton.core.ticking import ScaleWanted
from baton.core.types import ROLES, ClusterView, FlightView, HostId, LoadWindow, RequestId, Role, WorkerId, WorkerView
from baton.decide.control.advice import Policies, PolicyFailure, asked
from baton.decide.control.fleet import Fleet, processes_of
from baton.decide.control.load_history import LoadHistory
from baton.decide.policy.fleet import RoleChange

START_AGAIN_S = 10.0
"""Back-off after a failed start: its cause seldom disappears at once."""


@dataclass(slots=True)
class Reshaping:
    """Applies the choices of the policies for roles and scaling to the fleet."""

    rules: ScalingRules = field(default_factory=ScalingRules)
    history: LoadHistory = field(default_factory=LoadHistory)
    targets: Mapping[Role, int] = field(default_factory=dict[Role, int])
    """Workers per role that the scaling policy or an administrator asked for last. Other roles are missing."""
    pinned: dict[Role, int] = field(default_factory=dict[Role, int])
    """Workers per role that an administrator asked for. They replace the targets of the policy."""
    failure: str = ""
    """Error message of the last failure of such a policy. After a failure the fleet stays as it is."""
    workers_max: dict[HostId, int] = field(default_factory=dict[HostId, int])
    """Maximum number of workers of each host that has stated one."""
    _starting: dict[WorkerId, StartWorker] = field(default_factory=dict[WorkerId, StartWorker])
    """Requested workers that have neither joined nor failed."""
    _started: int = 0
    """Number of workers ever requested. It makes their names unique."""
    _again_s: float = 0.0
    """Time before which no worker is requested."""
    _begun_requests: int = 0
    """Since the last tick."""
    _cached_tokens: int = 0

    def begun(self, cached_tokens: int) -> None:
        """Count a prompt that was assigned to a worker, and its tokens that need no computation."""
        self._begun_requests += 1
        self._cached_tokens += cached_tokens

    @property
    def starting(self) -> dict[Role, int]:
        """Number of requested workers that have not joined, by role."""
        return dict(Counter(start.role for start in self._starting.values())) if self._starting else {}

    @property
    def is_asleep(self) -> bool:
        """Return whether the scaling policy has retired the whole fleet because it is idle."""
        return bool(self.targets) and not any(self.targets.values())

    @property
    def waits_for_hosts(self) -> bool:
        """Return whether hosts were requested that may not have joined yet."""
        is_started_elsewhere = self.rules.starts == "none" and any(self.targets.values())
        return is_started_elsewhere or (self.rules.starts == "hosts" and bool(self._starting))

    def tick(
        self, window: LoadWindow, cluster: ClusterView, policies: Policies, fleet: Fleet, now_s: float
    ) -> list[SetRole | StartWorker | RetireWorker]:
        """Ask the policies for roles and then, with those roles, for the size of the fleet. Apply both to `fleet`.

        Return the commands. A surplus worker that has requests drains.
        """
        self.history.append(replace(window, begun_requests=self._begun_requests, cached_tokens=self._cached_tokens))
        self._begun_requests = self._cached_tokens = 0
        roles, cost = policies.roles, policies.cost
        flips = asked(roles, lambda: _flips(roles.assign(cluster, self.history, cost, now_s), cluster))
        if isinstance(flips, PolicyFailure):
            self.failure = flips.reason
            return []
        flips = self._keeping_pins(flips, cluster)
        for flip in flips:
            fleet.set_role(flip.worker, flip.role)
        return [*flips, *self._scale(_flipped(cluster, flips), policies, fleet, now_s)]

    def _keeping_pins(self, flips: Sequence[SetRole], cluster: ClusterView) -> list[SetRole]:
        """Return the flips that take no pinned role further from its number of workers.

        Any other flip would be followed by the start or the end of a worker of that role.
        """
        if not self.pinned:
            return list(flips)
        roles: dict[WorkerId, Role] = {worker.id: worker.role for worker in cluster.workers}
        counts, kept = Counter(roles.values()) + Counter(self.starting), list[SetRole]()
        for flip in flips:
            old: Role = roles[flip.worker]
            new: Role = flip.role
            if counts[old] <= self.pinned.get(old, -1) or counts[new] >= self.pinned.get(new, len(roles) + 1):
                continue
            counts[old] -= 1
            counts[new] += 1
            kept.append(flip)
        return kept

    def wake(
        self, cluster: ClusterView, policies: Policies, fleet: Fleet, now_s: float
    ) -> list[StartWorker | RetireWorker]:
        """Ask the scaling policy at once, because a request has found no worker. Return the starts.

        Return nothing before the first tick, which brings a load history, and while workers are starting.
        """
        if self._starting or not self.history:
            return []
        return self._scale(cluster, policies, fleet, now_s)

    def _scale(
        self, cluster: ClusterView, policies: Policies, fleet: Fleet, now_s: float
    ) -> list[StartWorker | RetireWorker]:
        scaling = policies.scaling
        target = asked(scaling, lambda: scaling.target(cluster, self.history, policies.cost, now_s))
        if isinstance(target, PolicyFailure):
            self.failure = target.reason
            return []
        target = self.targets = {**target, **self.pinned}
        if self.rules.starts == "none" or not target:
            return []
        retired = self._shrink(target, cluster, fleet)
        return [*(self._grow(target, fleet) if now_s >= self._again_s else []), *retired]

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

    def pin(self, wanted: ScaleWanted) -> None:
        """Set or remove an administrator's target, from the next tick on."""
        if wanted.workers is None:
            self.pinned.pop(wanted.role, None)
        else:
            self.pinned[wanted.role] = wanted.workers

    def joined(self, worker: WorkerId) -> None:
        """Record that a worker has joined, whether it was requested or not."""
        self._starting.pop(worker, None)

    def lost(self, worker: WorkerId, now_s: float) -> None:
        """Record that a worker is lost. If it was requested and never joined, its start has failed: back off."""
        if self._starting.pop(worker, None) is not None:
            self._again_s = now_s + START_AGAIN_S

    def _grow(self, target: Mapping[Role, int], fleet: Fleet) -> list[StartWorker]:
        """Let draining workers serve again and start the missing ones, as far as the hosts have room."""
        live, starting = Counter(worker.role for worker in fleet.views()), self.starting
        missing = {
            role: target[role] - live[role] - starting.get(role, 0) for role in ROLES if target.get(role) is not None
        }
        for view in list(fleet.draining.values()):
            if missing.get(view.role, 0) > 0 and view.host not in fleet.leaving and view.id not in fleet.restarting:
                fleet.join(view)
                missing[view.role] -= 1
        commands: list[StartWorker] = []
        processes = Counter(view.host for view in processes_of(fleet))
        processes.update(start.host for start in self._starting.values())
        for _ in range(sum(max(0, count) for count in missing.values())):
            role = max(ROLES, key=lambda role: missing.get(role, 0) / max(1, target.get(role, 0)))
            name = f"{role}-added-{self._started + 1}"
            host = self._host_for(HostId(name), processes)
            if host is None:
                break
            missing[role] -= 1
            processes[host] += 1
            self._started += 1
            worker = first_worker(host, role) if self.rules.starts == "hosts" else WorkerId(name)
            command = StartWorker(worker, role, host)
            self._starting[command.worker] = command
            commands.append(command)
        return commands

    def _host_for(self, new: HostId, processes: Mapping[HostId, int]) -> HostId | None:
        """Return the new host if scaling starts hosts, else the host with the most room. None: there is no room.

        Empty: no host has a limit.
        """
        if self.rules.starts == "hosts":
            return new if len(processes) < self.rules.hosts_max else None
        if not self.workers_max:
            return HostId("")
        host = min(self.workers_max, key=lambda host: (processes.get(host, 0) - self.workers_max[host], host))
        return host if processes.get(host, 0) < self.workers_max[host] else None

    def _shrink(self, target: Mapping[Role, int], cluster: ClusterView, fleet: Fleet) -> list[RetireWorker]:
        """Retire surplus workers that are idle, and drain the others. The last worker stays unless all are unwanted.

        All are unwanted if the target of every role is 0, no worker has a request, and none is starting.
        """
        idle: list[RetireWorker] = []
        surplus: list[WorkerView] = []
        for role in ROLES:
            workers = [worker for worker in reversed(cluster.workers) if worker.role == role]
            count = max(0, len(workers) - max(target.get(role, len(workers)), 0))
            workers.sort(key=lambda worker: worker.running_requests + worker.queued_requests)
            surplus += workers[:count]
        is_asleep = not (self._starting or fleet.draining or any(worker.running_requests for worker in surplus))
        if len(surplus) == len(cluster.workers) and surplus and not is_asleep:
            surplus.pop()
        for worker in surplus:
            if worker.running_requests or worker.queued_requests:
                fleet.drain(worker.id)
            else:
                fleet.leave(worker.id)
                idle.append(RetireWorker(worker.id))
        return idle


def first_worker(host: HostId, role: Role) -> WorkerId:
    """Return the id of the first worker with this role on a host that joins."""
    return WorkerId(f"{host}.{role}-0")


def _flips(roles: Mapping[WorkerId, Role | RoleChange], cluster: ClusterView) -> list[SetRole]:
    if not roles:
        return []
    known = {worker.id: worker.role for worker in cluster.workers}
    changes = [
        SetRole(worker, change.role, change.reason) if isinstance(change, RoleChange) else SetRole(worker, change)
        for worker, change in sorted(roles.items(), key=itemgetter(0))
    ]
    return [flip for flip in changes if flip.role in ROLES and known.get(flip.worker, flip.role) != flip.role]


def _flipped(cluster: ClusterView, flips: Sequence[SetRole]) -> ClusterView:
    """Return the cluster with the new roles of these workers."""
    if not flips:
        return cluster
    roles = {flip.worker: flip.role for flip in flips}
    workers = tuple(
        replace(worker, role=roles[worker.id]) if worker.id in roles else worker for worker in cluster.workers
    )
    return replace(cluster, workers=workers)
