"""Baseline policies that ignore cost and cache."""

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
    """Use each worker in turn, whatever its load. Routing and placement count separately."""

    route_turn: int = 0
    place_turn: int = 0

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
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
        self.place_turn += 1
        return candidates[(self.place_turn - 1) % len(candidates)].id


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWorker:
    """Use a random worker, drawn from the request id and a seed, so that repeated runs make the same choices."""

    seed: int = 0

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        return candidates[draw(f"route {request.id}", self.seed, len(candidates))].id

    def place(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> WorkerId:
        return candidates[draw(f"place {request.id}", self.seed, len(candidates))].id


@dataclass(frozen=True, slots=True)
class LeastLoad:
    """Use the worker with the fewest requests, and the lower id on a tie."""

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        return min(candidates, key=_FEWEST).id

    def place(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> WorkerId:
        return self.route(request, candidates, cluster, cost)


@dataclass(frozen=True, slots=True)
class ShortestQueue:
    """Use the worker with the fewest queued prompt tokens, then the fewest requests, then the lower id.

    Source: the load balancing that Mooncake compares with (FAST 2025, figure 5); DistServe (OSDI 2024, section 4.3).
    """

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        return min(candidates, key=lambda worker: (worker.queued_tokens, worker.running_requests, worker.id)).id


@dataclass(frozen=True, slots=True)
class Colocated:
    """Run each request on one worker from prompt to end, the one with the fewest requests. Roles are ignored.

    Source: Sarathi-Serve (OSDI 2024). The batching policy divides prompts into chunks.
    """

    def route(self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel) -> Route:
        worker = min(cluster.workers, key=lambda worker: (worker.running_requests, worker.queued_tokens, worker.id))
        return Route(worker=worker.id, until="end")
