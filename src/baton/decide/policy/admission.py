"""Admission: whether a request is taken at all. A refusal now is kinder than a timeout later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from msgspec import Struct

from baton.core.messages import RejectReason
from baton.core.ports import CostModel
from baton.core.types import ClusterView, Request, Slo, WorkerView
from baton.decide.policy.predictions import first_token_delay_s, queue_s
from baton.decide.policy.prefix import best_prefix


class Reject(Struct, frozen=True, kw_only=True):
    """Why a request is not taken, in words for its client, and when to come back."""

    reject: RejectReason
    reason: str
    retry_after_s: float


@runtime_checkable
class AdmissionPolicy(Protocol):
    def admit(self, request: Request, cluster: ClusterView, cost: CostModel, now_s: float) -> Reject | None:
        """Return None to take the request, or the reason why not."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedQueue:
    """Take what has a place in the queue and, for requests with an SLO, what can still meet its TTFT.

    The queue's bound is what keeps the server's memory bounded (INV-9).
    """

    requests_max: int = 1024
    """Most requests in the cluster, waiting and running."""
    ttft_slack: float = 1.0
    """Admit while predicted TTFT <= slack * SLO. 1.0 trusts the cost model exactly."""

    def admit(self, request: Request, cluster: ClusterView, cost: CostModel, now_s: float) -> Reject | None:
        """See `AdmissionPolicy.admit`."""
        live = cluster.waiting_requests + sum(worker.running_requests for worker in cluster.workers)
        if live >= self.requests_max:
            shortest_s = min((queue_s(worker, cost) for worker in cluster.having("prefill")), default=1.0)
            reason = f"{live} requests are waiting or running, and the queue holds {self.requests_max}; try again later"
            return Reject(reject="queue_full", reason=reason, retry_after_s=max(1.0, shortest_s))
        if request.slo is None:
            return None
        return self._misses_slo(request, request.slo.ttft_s, cluster, cost)

    def _misses_slo(self, request: Request, ttft_s: float, cluster: ClusterView, cost: CostModel) -> Reject | None:
        hit_tokens = max(cluster.prefix_hit_tokens.values(), default=0)

        def first_token_s(worker: WorkerView) -> float:
            """Any arena's hit may be pulled over; what a tier has, only its own host can read."""
            hits, model, wait_s = cluster.tier_hits.get(worker.host, ()), cost.on(worker.kind), queue_s(worker, cost)
            prompt_s = best_prefix(request, hit_tokens, hits, model, wait_s=wait_s).ttft_s
            return prompt_s + first_token_delay_s(worker, request, cluster, cost, prompt_s=prompt_s - wait_s)

        waits_s = [first_token_s(worker) for worker in cluster.having("prefill")]
        if not waits_s or min(waits_s) <= self.ttft_slack * ttft_s:
            return None
        predicted_s = min(waits_s)
        reason = f"the first token is predicted after {predicted_s:.3f} s, later than the SLO of {ttft_s:.3f} s"
        return Reject(reject="slo", reason=reason, retry_after_s=max(1.0, predicted_s - ttft_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitAll:
    """Take every request that the queue has room for, whatever it was promised: what most of the literature does."""

    requests_max: int = 65_536
    """Most requests in the cluster: the bound that INV-9 asks for."""

    def admit(self, request: Request, cluster: ClusterView, cost: CostModel, now_s: float) -> Reject | None:
        """See `AdmissionPolicy.admit`."""
        live = cluster.waiting_requests + sum(worker.running_requests for worker in cluster.workers)
        if live < self.requests_max:
            return None
        reason = f"{live} requests are waiting or running, and the queue holds {self.requests_max}; try again later"
        return Reject(reject="queue_full", reason=reason, retry_after_s=1.0)


def refuse_late(slo: Slo, ttft_s: float, tpot_s: float) -> Reject | None:
    """Refuse what is predicted to miss its SLO, in words."""
    if ttft_s > slo.ttft_s:
        reason = f"the first token is predicted after {ttft_s:.3f} s, later than the SLO of {slo.ttft_s:.3f} s"
        return Reject(reject="slo", reason=reason, retry_after_s=max(1.0, ttft_s - slo.ttft_s))
    if tpot_s > slo.tpot_s:
        reason = f"a token is predicted every {tpot_s:.4f} s, slower than the SLO of {slo.tpot_s:.4f} s"
        return Reject(reject="slo", reason=reason, retry_after_s=1.0)
    return None
