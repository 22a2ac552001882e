"""Simple policies to compare with: each routes prompts and places decodes, without a thought for cost or cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.ports import CostModel
from baton.core.types import ClusterView, HostId, Request, WorkerId, WorkerView


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
