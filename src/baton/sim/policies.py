"""The policies of a simulation by name: ours, and simple ones to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.control.coordinator import Policies
from baton.core.errors import ConfigError
from baton.core.names import did_you_mean
from baton.core.ports import CostModel
from baton.core.types import ClusterView, HostId, Request, WorkerId, WorkerView
from baton.policy.admission import BoundedQueue
from baton.policy.batching import MixedChunked
from baton.policy.eviction import LeastRecentlyUsed
from baton.policy.fairness import FirstComeFirstServed
from baton.policy.placement import FastestStep, PlacementPolicy
from baton.policy.routing import EarliestFirstToken, RoutingPolicy
from baton.sim.cluster import SimPolicies
from baton.sim.spec import ClusterSpec


@dataclass(slots=True)
class RoundRobin:
    """Each worker in turn, whatever it does. Routes and places."""

    turn: int = 0

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        """See `RoutingPolicy.route`."""
        self.turn += 1
        return candidates[(self.turn - 1) % len(candidates)].id

    def place(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> WorkerId:
        """See `PlacementPolicy.place`."""
        return self.route(request, candidates, cluster, cost)


@dataclass(frozen=True, slots=True)
class LeastLoad:
    """The worker with the fewest requests; the lower id among equals. Routes and places."""

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        """See `RoutingPolicy.route`."""
        return min(candidates, key=lambda worker: (worker.running_requests, worker.id)).id

    def place(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> WorkerId:
        """See `PlacementPolicy.place`."""
        return self.route(request, candidates, cluster, cost)


Choice = tuple[Callable[[], RoutingPolicy], Callable[[], PlacementPolicy]]
CHOICES: dict[str, Choice] = {
    "baton": (EarliestFirstToken, FastestStep),
    "round-robin": (RoundRobin, RoundRobin),
    "least-load": (LeastLoad, LeastLoad),
}
"""Who routes and who places, by the name that `baton sim --policy` takes."""


def build_policies(name: str, spec: ClusterSpec) -> SimPolicies:
    """Make the policies of a name, fresh. Raises ConfigError for an unknown one: it lists the known."""
    choice = CHOICES.get(name)
    if choice is None:
        raise ConfigError(f"unknown policy {name!r}{did_you_mean(name, CHOICES)}; known are {', '.join(CHOICES)}")
    routing, placement = choice
    cluster = Policies(
        admission=BoundedQueue(requests_max=spec.queue_requests_max),
        routing=routing(),
        placement=placement(),
        fairness=FirstComeFirstServed(),
        cost=spec.cost.model(),
    )
    return SimPolicies(cluster=cluster, batching=MixedChunked(), eviction=LeastRecentlyUsed)
