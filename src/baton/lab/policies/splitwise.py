"""Splitwise: prefill workers, decode workers, and a mixed pool that grows when either side is overloaded.

Source: Splitwise (ISCA 2024), section IV.A, and the artefact's mixed-pool scheduler with its limits. Here a worker
belongs to the mixed pool while it has work of the other role, and leaves it after the last such request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.core.ports import CostModel
from baton.core.types import ClusterView, HostId, Request, WorkerId, WorkerView
from baton.decide.policy.predictions import decoding_requests, kv_free_tokens
from baton.decide.policy.routing import Route

Order = Callable[[WorkerView], tuple[float, ...]]


def is_mixed(worker: WorkerView) -> bool:
    """Return whether the worker is mixed by role, or currently has work of the other role."""
    match worker.role:
        case "mixed":
            return True
        case "decode":
            return worker.queued_tokens > 0
        case "prefill":
            return decoding_requests(worker) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitwiseRouting:
    """Use the prefill worker with the shortest queue. Beyond its limit use the mixed pool, then a decode worker."""

    queued_tokens_max: int = 8192

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId | Route:
        own = [worker for worker in cluster.workers if worker.role == "prefill" and not is_mixed(worker)]
        pool = [worker for worker in cluster.workers if is_mixed(worker)]
        lent = [worker for worker in cluster.workers if worker.role == "decode" and not is_mixed(worker)]
        chosen = (
            _least([worker for worker in own if worker.queued_tokens <= self.queued_tokens_max], _queue)
            or _least([worker for worker in pool if worker.queued_tokens <= self.queued_tokens_max], _queue)
            or _least(lent, _queue)
            or _least(cluster.workers, _queue)
        )
        assert chosen is not None, "candidates is never empty"
        until = "end" if chosen.role == "mixed" else "first_token"
        return Route(worker=chosen.id, until=until)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitwisePlacement:
    """Use the decode worker with the least KV in use. Beyond its limit use the mixed pool, then a prefill worker."""

    requests_max: int = 2048
    """Maximum number of requests on a decode worker."""

    def place(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> WorkerId:
        def fits(worker: WorkerView) -> bool:
            return worker.running_requests < self.requests_max and kv_free_tokens(worker) >= request.prompt_tokens

        own = [worker for worker in cluster.workers if worker.role == "decode" and not is_mixed(worker)]
        pool = [worker for worker in cluster.workers if is_mixed(worker)]
        lent = [worker for worker in cluster.workers if worker.role == "prefill" and not is_mixed(worker)]
        chosen = (
            _least(filter(fits, own), _memory)
            or _least(filter(fits, pool), _memory)
            or _least(lent, _memory)
            or _least(cluster.workers, _memory)
        )
        assert chosen is not None, "candidates is never empty"
        return chosen.id


def _least(workers: Iterable[WorkerView], order: Order) -> WorkerView | None:
    return min(workers, key=lambda worker: (order(worker), worker.id), default=None)


def _queue(worker: WorkerView) -> tuple[float, ...]:
    return (worker.queued_tokens, worker.running_requests)


def _memory(worker: WorkerView) -> tuple[float, ...]:
    return (worker.context_tokens, worker.running_requests)
