"""Routing: which worker computes a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from baton.core.ports import CostModel
from baton.core.types import ClusterView, Request, WorkerId, WorkerView


@runtime_checkable
class RoutingPolicy(Protocol):
    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        """Choose among the candidates (never empty), the live workers that may prefill."""
        ...


@dataclass(frozen=True, slots=True)
class EarliestFirstToken:
    """Send the prompt where its first token is predicted soonest.

    Why: a long queue with a prefix hit can beat an idle worker without one, and only the sum of queue and uncached
    prefill tells which. Ties go to the worker with fewer running requests, then to the lower id.
    """

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        """See `RoutingPolicy.route`."""

        def key(worker: WorkerView) -> tuple[float, int, WorkerId]:
            hit_tokens = cluster.prefix_hit_tokens.get(worker.host, 0)
            queue_s = cost.prefill_s(new_tokens=worker.queued_tokens, cached_tokens=0)
            own_s = cost.prefill_s(new_tokens=request.prompt_tokens - hit_tokens, cached_tokens=hit_tokens)
            return (queue_s + own_s, worker.running_requests, worker.id)

        return min(candidates, key=key).id
