"""Arrow: stateless workers change roles as soon as TTFT or TPOT is at risk.

Source: Arrow (arXiv 2505.11916v2), sections on SLO-aware request scheduling and on elastic instance pools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.core.ports import CostModel
from baton.core.types import ClusterView, LoadWindow, Request, Role, WorkerId, WorkerView
from baton.decide.policy.predictions import decode_step_s, first_token_s, queue_s
from baton.decide.policy.routing import Route


@dataclass(frozen=True, slots=True)
class ArrowRouting:
    """Route to the prefill worker with the lowest TTFT. If all would miss the SLO, use the least busy decode worker.

    That decode worker computes the prompt only; the request is then placed like any other.
    """

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId | Route:
        def ttft_s(worker: WorkerView) -> tuple[float, WorkerId]:
            return (first_token_s(worker, request, cluster, cost), worker.id)

        best = min(candidates, key=ttft_s)
        others = [worker for worker in cluster.workers if worker.role == "decode"]
        if request.slo is None or not others or ttft_s(best)[0] <= request.slo.ttft_s:
            return best.id
        lent = min(others, key=lambda worker: (*ttft_s(worker), worker.context_tokens))
        step_s = decode_step_s(lent, cost)
        if ttft_s(lent)[0] >= ttft_s(best)[0] or step_s > request.slo.tpot_s:
            return best.id
        return Route(worker=lent.id, until="first_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowRoles:
    """Flip one worker per tick from the role with slack to the role that is predicted to miss its SLO."""

    ttft_s: float = 1.0
    """TTFT target if the requests of the last window have no SLO."""
    tpot_s: float = 0.1
    """TPOT target if the requests of the last window have no SLO."""
    ease_ratio: float = 0.5
    """A role loses a worker only while its latency is at most this share of its SLO."""

    def assign(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[WorkerId, Role]:
        window = history[-1]
        prefill = [worker for worker in cluster.workers if worker.role == "prefill"]
        decode = [worker for worker in cluster.workers if worker.role == "decode"]
        waits_s = [queue_s(worker, cost) for worker in prefill]
        steps_s = [decode_step_s(worker, cost) for worker in decode]
        late = max(min(waits_s, default=0.0), window.ttft_s) / (window.slo_ttft_s or self.ttft_s)
        slow = max(min(steps_s, default=0.0), window.tpot_s) / (window.slo_tpot_s or self.tpot_s)
        if late > 1.0 and slow <= self.ease_ratio and len(decode) > 1:
            given = min(decode, key=lambda worker: (worker.context_tokens, worker.id))
            return {given.id: "prefill"}
        if slow > 1.0 and late <= self.ease_ratio and len(prefill) > 1:
            given = min(prefill, key=lambda worker: (worker.queued_tokens, worker.id))
            return {given.id: "decode"}
        return {}
