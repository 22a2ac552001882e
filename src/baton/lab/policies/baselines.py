"""Simple policies to compare with, without a thought for cost or cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from baton.core.ports import CostModel
from baton.core.types import ClusterView, HostId, Request, WorkerId, WorkerView
from baton.decide.policy.routing import Route
from baton.lab.policies.draws import draw

_REQUESTS, _FEWEST = attrgetter("running_requests"), attrgetter("running_requests", "id")


@dataclass(slots=True)
class RoundRobin:
    """Each worker in turn, whatever it does. Routes and places, each in its own turn."""

    route_turn: int = 0
    place_turn: int = 0

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        """See `RoutingPolicy.route`."""
        self.route_turn += 1
        return candidates[(self.route_turn - 1) % len(candidates)].id

    def place(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> WorkerId:
        """See `PlacementPolicy.place`."""
        self.place_turn += 1
        return candidates[(self.place_turn - 1) % len(candidates)].id


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWorker:
    """Any worker, drawn from the request's id and a seed: the same request is sent the same way in every run."""

    seed: int = 0

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        """See `RoutingPolicy.route`."""
        return candidates[draw(f"route {request.id}", self.seed, len(candidates))].id

    def place(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> WorkerId:
        """See `PlacementPolicy.place`."""
        return candidates[draw(f"place {request.id}", self.seed, len(candidates))].id


@dataclass(frozen=True, slots=True)
class LeastLoad:
    """The worker with the fewest requests; the lower id among equals. Routes and places."""

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        """See `RoutingPolicy.route`."""
        return min(candidates, key=_FEWEST).id

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
class ShortestQueue:
    """The worker with the fewest prompt tokens left to compute, then the fewest requests; the lower id of equals.

    Source: the load balancing that Mooncake compares with (FAST 2025, figure 5); DistServe (OSDI 2024, section 4.3).
    """

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        """See `RoutingPolicy.route`."""
        return min(candidates, key=lambda worker: (worker.queued_tokens, worker.running_requests, worker.id)).id


@dataclass(frozen=True, slots=True)
class Colocated:
    """No disaggregation: every worker computes prompts and answers, in chunks; the one with the fewest requests.

    What roles the workers have makes no difference. Source: Sarathi-Serve (OSDI 2024); the chunks are the batcher's.
    """

    def route(self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel) -> Route:
        """See `RoutingPolicy.route`."""
        worker = min(cluster.workers, key=lambda worker: (worker.running_requests, worker.queued_tokens, worker.id))
        return Route(worker=worker.id, until="end")
