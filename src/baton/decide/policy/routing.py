"""Routing: choose the worker that computes a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from msgspec import Struct

from baton.core.ports import CostModel
from baton.core.report_parts import StepPrices
from baton.core.types import ClusterView, HostId, Prediction, Request, Until, WorkerId, WorkerView
from baton.decide.cost.online import cost_of
from baton.decide.policy.predictions import first_token_delay_s, queue_s
from baton.decide.policy.prefix import prefix_on


class Route(Struct, frozen=True, kw_only=True):
    """The worker that computes a prompt, the source of its prefix, and how far it runs the request."""

    worker: WorkerId
    fetch: HostId | None = None
    """Host from which a longer prefix is pulled before the worker starts. None: use the prefix of the worker's host."""
    until: Until | None = None
    """How far the worker runs the request. None: a prefill worker to the first token, any other worker to the end."""
    predicted: Prediction | None = None
    """The predicted latencies on this route, which are later compared with the actual ones. None: not predicted."""


@runtime_checkable
class RoutingPolicy(Protocol):
    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId | Route:
        """Choose the worker that computes the prompt.

        The candidates (never empty) are the live prefill and mixed workers. A policy may choose any other worker of
        `cluster.workers`: a decode worker then computes both the prompt and the answer.
        """
        ...


@dataclass(frozen=True, slots=True)
class EarliestFirstToken:
    """Route the prompt to the worker with the lowest predicted TTFT.

    Why: a long queue with a prefix hit can beat an idle worker without one. Only the sum of queue, tier reads and
    uncached prefill decides. Ties go to the worker with fewer running requests, then to the lower id.
    """

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        own_s: dict[tuple[str, StepPrices | None, int], float] = {}  # equal workers with the same hit share an entry

        def left_s(worker: WorkerView, prompt_s: float) -> float:
            return first_token_delay_s(worker, request, cluster, cost, prompt_s=prompt_s)

        def key(worker: WorkerView) -> tuple[float, int, WorkerId]:
            wait_s = queue_s(worker, cost)
            if worker.host in cluster.tier_hits:
                ttft_s = prefix_on(worker, request, cluster, cost, wait_s=wait_s).ttft_s
                return (ttft_s + left_s(worker, ttft_s - wait_s), worker.running_requests, worker.id)
            hit_tokens = cluster.prefix_hit_tokens.get(worker.host, 0)
            alike = (worker.kind, worker.prices, hit_tokens)
            if alike not in own_s:
                new_tokens = request.prompt_tokens - hit_tokens
                own_s[alike] = cost_of(worker, cost).prefill_s(new_tokens=new_tokens, cached_tokens=hit_tokens)
            return (wait_s + own_s[alike] + left_s(worker, own_s[alike]), worker.running_requests, worker.id)

        return min(candidates, key=key).id
