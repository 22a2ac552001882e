"""Mooncake's early rejection: reject a request on arrival if its TTFT or TPOT would miss the SLO.

Source: Mooncake (FAST 2025 and arXiv 2407.00079), sections on overload-oriented scheduling.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from baton.core.ports import CostModel
from baton.core.types import ClusterView, Request, StepShape, WorkerView
from baton.decide.policy.admission import Reject, refuse_full, refuse_late
from baton.decide.policy.predictions import decode_step_s, first_token_s

RECENT_MAX = 65_536
"""Maximum number of admitted requests that are remembered for the prediction (INV-9)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyRejection:
    """Reject a request by the current prefill and decode load.

    The load may have changed when the prompt finishes. Under overload, the policy therefore alternates between phases
    of admission and of rejection.
    """

    requests_max: int = 65_536
    """Maximum number of requests in the cluster (INV-9)."""

    def admit(self, request: Request, cluster: ClusterView, cost: CostModel, now_s: float) -> Reject | None:
        full = refuse_full(cluster, cost, self.requests_max)
        if full is not None or request.slo is None:
            return full
        ttft_s = soonest_s(request, cluster, cost)
        tpot_s = min(
            (
                decode_step_s(worker, cost, more_requests=1, more_tokens=request.prompt_tokens)
                for worker in cluster.having("decode")
            ),
            default=0.0,
        )
        return refuse_late(request.slo, ttft_s, tpot_s)


@dataclass(slots=True, kw_only=True)
class PredictedRejection:
    """Reject a request by the decode load that the whole cluster is predicted to have when its prompt finishes.

    The prediction assumes that each admitted request decodes from its predicted first token on, for the expected
    output length. The load at a given time is the number of these spans that cover it.
    """

    requests_max: int = 65_536
    """Maximum number of requests in the cluster (INV-9)."""
    output_tokens: float = 200.0
    """Expected output length until some requests have finished."""
    _spans: deque[tuple[float, float, int]] = field(
        default_factory=lambda: deque[tuple[float, float, int]](maxlen=RECENT_MAX)
    )
    """(start, end, prompt tokens) of the predicted decode of each admitted request."""

    def admit(self, request: Request, cluster: ClusterView, cost: CostModel, now_s: float) -> Reject | None:
        full = refuse_full(cluster, cost, self.requests_max)
        if full is not None:
            return full
        workers = cluster.having("decode") or list(cluster.workers)
        ttft_s = soonest_s(request, cluster, cost)
        begin_s = now_s + ttft_s
        tpot_s = self._step_s(workers, begin_s, request, cost) if workers else 0.0
        if request.slo is not None:
            refused = refuse_late(request.slo, ttft_s, tpot_s)
            if refused is not None:
                return refused
        output_tokens = cluster.expected_output_tokens or self.output_tokens
        self._spans.append((begin_s, begin_s + output_tokens * tpot_s, request.prompt_tokens))
        while self._spans and self._spans[0][1] <= now_s:
            self._spans.popleft()
        return None

    def _step_s(self, workers: list[WorkerView], at_s: float, request: Request, cost: CostModel) -> float:
        """Return the predicted decode step time at `at_s`, with the requests spread evenly over the workers."""
        prompts = [prompt for begin_s, end_s, prompt in self._spans if begin_s <= at_s < end_s]
        shape = StepShape(
            decode_requests=-(-len(prompts) // len(workers)) + 1,
            context_tokens=sum(prompts) // len(workers) + request.prompt_tokens,
        )
        return min(cost.on(worker.kind).step_s(shape) for worker in workers)


def soonest_s(request: Request, cluster: ClusterView, cost: CostModel) -> float:
    """Return the lowest predicted TTFT of all prefill workers, or 0 if there is none."""
    workers = cluster.having("prefill")
    return min((first_token_s(worker, request, cluster, cost) for worker in workers), default=0.0)
