"""Views to decide on, by hand."""

from __future__ import annotations

from baton.core.types import (
    ClusterView,
    ErrorBar,
    HostId,
    PredictionErrors,
    Request,
    RequestId,
    Role,
    Slo,
    WorkerId,
    WorkerView,
)
from baton.decide.cost.linear import LinearCost

COST = LinearCost(
    step_overhead_s=0.01,
    prefill_token_s=0.001,
    prefill_pair_s=0.0,
    decode_request_s=0.001,
    context_token_s=0.0,
    handoff_local_s=0.0,
    handoff_token_s=0.0001,
)
"""1 ms a prompt token, 10 ms a step and 1 ms more per decoding request, 0.1 ms a token between hosts."""

TRIED = PredictionErrors(ErrorBar(0.0, 0.0, 50.0), ErrorBar(0.0, 0.0, 50.0))
"""The predictions for many requests were exact: an idle worker need not try another one."""


def worker(
    name: str,
    role: Role = "prefill",
    *,
    queued_tokens: int = 0,
    queued_requests: int = 0,
    running_requests: int = 0,
    context_tokens: int = 0,
    host: str = "h",
    kv_tokens_max: int = 0,
) -> WorkerView:
    return WorkerView(
        id=WorkerId(name),
        host=HostId(host),
        role=role,
        queued_tokens=queued_tokens,
        queued_requests=queued_requests or min(queued_tokens, 1),
        running_requests=max(running_requests, queued_requests or min(queued_tokens, 1)),
        context_tokens=context_tokens,
        kv_tokens_max=kv_tokens_max,
    )


def request(
    name: str = "r", *, prompt_tokens: int = 1000, tenant: str = "", slo: Slo | None = None, arrived_at_s: float = 0.0
) -> Request:
    return Request(
        id=RequestId(name),
        prompt_tokens=prompt_tokens,
        output_tokens_max=4096,
        arrived_at_s=arrived_at_s,
        tenant=tenant,
        slo=slo,
    )


def cluster(*workers: WorkerView, hits: dict[str, int] | None = None, expected_tokens: float = 0.0) -> ClusterView:
    return ClusterView(
        workers=workers,
        prefix_hit_tokens={HostId(host): tokens for host, tokens in (hits or {}).items()},
        expected_output_tokens=expected_tokens,
    )
