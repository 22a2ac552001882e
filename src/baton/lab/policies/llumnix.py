"""Llumnix: route to the worker with the most free KV per request, and move running requests to rebalance.

Source: Llumnix (OSDI 2024), sections 4.3 and 4.4: freeness, dispatch to the freest, migration between pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.core.ports import CostModel
from baton.core.types import ClusterView, FlightView, HostId, Request, RequestId, WorkerId, WorkerView
from baton.decide.policy.routing import Route

KV_TOKENS_IF_UNKNOWN = 1_000_000
"""Assumed arena size of a worker that does not report it. It is so large that only the used tokens affect the order."""


def freeness(worker: WorkerView) -> float:
    """Return the number of steps until the worker's KV is full: free tokens per running request.

    Queued prompts count as used, so the result can be negative.
    """
    kv_tokens = worker.kv_tokens_max or KV_TOKENS_IF_UNKNOWN
    return (kv_tokens - worker.context_tokens - worker.queued_tokens) / max(1, worker.running_requests)


@dataclass(frozen=True, slots=True)
class LlumnixRouting:
    """Route to the worker with the highest freeness, and decode on the host that holds the KV.

    Every prefill ends at the first token, even if the same worker decodes: only decoding requests can be moved.
    """

    def route(self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel) -> Route:
        # Roles are ignored: every worker may compute prompts.
        return Route(worker=_freest(cluster.workers).id, until="first_token")

    def place(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> WorkerId:
        return _freest([worker for worker in cluster.workers if worker.host == source] or cluster.workers).id


@dataclass(frozen=True, slots=True, kw_only=True)
class LlumnixMoves:
    """At every tick, pair the workers with the lowest and the highest freeness, and move one request per pair."""

    source_steps_max: float = 100.0
    """A worker with a lower freeness is a source of moves."""
    target_steps_min: float = 400.0
    """A worker with a higher freeness is a target of moves."""

    def moves(
        self, cluster: ClusterView, flights: Sequence[FlightView], cost: CostModel, now_s: float
    ) -> Mapping[RequestId, WorkerId]:
        ordered = sorted(cluster.workers, key=lambda worker: (freeness(worker), worker.id))
        sources = [worker for worker in ordered if freeness(worker) < self.source_steps_max]
        targets = [worker for worker in reversed(ordered) if freeness(worker) > self.target_steps_min]
        chosen: dict[RequestId, WorkerId] = {}
        for source, target in zip(sources, targets, strict=False):
            own = [flight for flight in flights if flight.worker == source.id]
            if len(own) > 1:
                moved = max(own, key=lambda flight: (flight.request.priority, flight.started_at_s, flight.request.id))
                chosen[moved.request.id] = target.id
        return chosen


def _freest(workers: Sequence[WorkerView]) -> WorkerView:
    return min(workers, key=lambda worker: (-freeness(worker), worker.running_requests, worker.id))
