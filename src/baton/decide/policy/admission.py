"""Admission: accept or reject a request on arrival. An early rejection is better for a client than a timeout."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol, runtime_checkable

from msgspec import Struct

from baton.core.messages import RejectReason
from baton.core.ports import CostModel
from baton.core.types import ClusterView, Request, Slo, WorkerView
from baton.decide.cost.online import cost_of
from baton.decide.policy.predictions import first_token_delay_s, queue_s
from baton.decide.policy.prefix import best_prefix

_RUNNING_REQUESTS = attrgetter("running_requests")


class Reject(Struct, frozen=True, kw_only=True):
    """A rejection: the reason as a message for the client, and when to retry."""

    reject: RejectReason
    reason: str
    retry_after_s: float


@runtime_checkable
class AdmissionPolicy(Protocol):
    def admit(self, request: Request, cluster: ClusterView, cost: CostModel, now_s: float) -> Reject | None:
        """Return None to accept the request, or the rejection."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedQueue:
    """Accept a request if the queue has a place. If the request has an SLO, its TTFT must also be within reach.

    The bound of the queue also bounds the server's memory (INV-9).
    """

    requests_max: int = 1024
    """Maximum number of requests in the cluster, waiting and running."""
    ttft_slack: float = 1.0
    """Admit while predicted TTFT <= slack * SLO. 1.0 trusts the cost model exactly."""

    def admit(self, request: Request, cluster: ClusterView, cost: CostModel, now_s: float) -> Reject | None:
        full = refuse_full(cluster, cost, self.requests_max)
        if full is not None or request.slo is None:
            return full
        return self._misses_slo(request, request.slo.ttft_s, cluster, cost)

    def _misses_slo(self, request: Request, ttft_s: float, cluster: ClusterView, cost: CostModel) -> Reject | None:
        hit_tokens = max(cluster.prefix_hit_tokens.values(), default=0)

        def first_token_s(worker: WorkerView) -> float:
            # A prefix in any arena can be pulled by this host. Tiers are read by their own host only.
            hits, model, wait_s = cluster.tier_hits.get(worker.host, ()), cost_of(worker, cost), queue_s(worker, cost)
            prompt_s = best_prefix(request.prompt_tokens, hit_tokens, hits, model, wait_s=wait_s).ttft_s
            return prompt_s + first_token_delay_s(worker, request, cluster, cost, prompt_s=prompt_s - wait_s)

        waits_s = [first_token_s(worker) for worker in cluster.having("prefill")]
        is_idle = not any(worker.running_requests for worker in cluster.workers)
        if not waits_s or is_idle or min(waits_s) <= self.ttft_slack * ttft_s:
            return None  # an idle cluster takes every request: only observed requests correct a wrong prediction
        return _refuse_first_token(min(waits_s), ttft_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitAll:
    """Accept every request that the queue has room for, whatever its SLO. Most published systems do this."""

    requests_max: int = 65_536
    """Maximum number of requests in the cluster (INV-9)."""

    def admit(self, request: Request, cluster: ClusterView, cost: CostModel, now_s: float) -> Reject | None:
        return refuse_full(cluster, cost, self.requests_max)


def refuse_full(cluster: ClusterView, cost: CostModel, requests_max: int) -> Reject | None:
    """Return a rejection if the cluster has `requests_max` requests, waiting and running, else None (INV-9)."""
    live = cluster.waiting_requests + sum(map(_RUNNING_REQUESTS, cluster.workers))
    if live < requests_max:
        return None
    shortest_s = min((queue_s(worker, cost) for worker in cluster.having("prefill")), default=1.0)
    most = f"at most {requests_max} may be (policy.admission.options.requests_max)"
    reason = f"{live} requests are waiting or running, {most}; send the request again later"
    return Reject(reject="queue_full", reason=reason, retry_after_s=max(1.0, shortest_s))


def refuse_late(slo: Slo, ttft_s: float, tpot_s: float) -> Reject | None:
    """Return a rejection if the predicted TTFT or TPOT misses the SLO, else None."""
    if ttft_s > slo.ttft_s:
        return _refuse_first_token(ttft_s, slo.ttft_s)
    if tpot_s > slo.tpot_s:
        reason = f"a token is predicted every {tpot_s:.4f} s, slower than the SLO of {slo.tpot_s:.4f} s"
        return Reject(reject="slo", reason=f"{reason}; send the request again later", retry_after_s=1.0)
    return None


def _refuse_first_token(ttft_s: float, slo_s: float) -> Reject:
    times = f"after {ttft_s:.3f} s, later than the SLO of {slo_s:.3f} s"
    reason = f"the first token is predicted {times}; send the request again later"
    return Reject(reject="slo", reason=reason, retry_after_s=max(1.0, ttft_s - slo_s))
