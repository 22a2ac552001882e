"""Each default policy's choice, by example."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.core.config import load
from baton.core.plugin import load_plugin
from baton.core.types import ClusterView, HostId, Request, RequestId, WorkerId, WorkerView
from baton.decide.cost.linear import LinearCost
from baton.decide.policy.admission import BoundedQueue
from baton.decide.policy.placement import FastestStep
from baton.decide.policy.routing import EarliestFirstToken, RoutingPolicy

COST = LinearCost(step_overhead_s=0.0, prefill_token_s=0.001, decode_request_s=0.01, context_token_s=0.0)
EXAMPLES = Path(__file__).resolve().parents[4] / "examples" / "policies"


def worker(name: str, *, queued_tokens: int = 0, running_requests: int = 0, host: str = "h") -> WorkerView:
    return WorkerView(
        id=WorkerId(name), host=HostId(host), role="mixed", queued_tokens=queued_tokens,
        running_requests=running_requests,
    )  # fmt: skip


def request(*, tenant: str = "") -> Request:
    return Request(id=RequestId("r"), prompt_tokens=1000, output_tokens_max=8, arrived_at_s=0.0, tenant=tenant)


def view(*workers: WorkerView, **hit_tokens: int) -> ClusterView:
    return ClusterView(workers=workers, prefix_hit_tokens={HostId(host): n for host, n in hit_tokens.items()})


def test_a_prefix_hit_beats_a_shorter_queue() -> None:
    """900 cached tokens save 0.9 s, which is worth waiting 0.5 s for."""
    busy, idle = worker("busy", queued_tokens=500, host="warm"), worker("idle", host="cold")
    assert EarliestFirstToken().route(request(), [busy, idle], view(busy, idle, warm=900), COST) == "busy"
    assert EarliestFirstToken().route(request(), [busy, idle], view(busy, idle, warm=400), COST) == "idle"


def test_decode_goes_where_the_next_step_is_shortest() -> None:
    full, light = worker("full", running_requests=9), worker("light", running_requests=2)
    assert FastestStep().place(request(), None, [full, light], view(full, light), COST) == "light"


def test_a_full_queue_is_refused_with_both_numbers() -> None:
    cluster = view(worker("a", running_requests=5))
    refused = BoundedQueue(requests_max=5).admit(request(), cluster, COST, 0.0)
    assert refused is not None
    assert refused.reject == "queue_full"
    assert refused.reason.startswith("5 requests are waiting or running, at most 5 may be")
    assert refused.retry_after_s >= 1.0
    assert BoundedQueue(requests_max=6).admit(request(), cluster, COST, 0.0) is None


def test_the_example_policy_is_loaded_from_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant stays at home until home is more than `behind_tokens` behind."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    named = load((EXAMPLES / "sticky_tenant.toml").read_text()).policy.routing
    policy = load_plugin(named.use, named.options, expects=RoutingPolicy)
    calm = [worker("a"), worker("b")]
    home = policy.route(request(tenant="t"), calm, view(*calm), COST)
    for behind_tokens, stays in ((1024, True), (1025, False)):
        busy = [worker(name, queued_tokens=behind_tokens if name == home else 0) for name in ("a", "b")]
        assert (policy.route(request(tenant="t"), busy, view(*busy), COST) == home) == stays


def test_the_example_policy_is_short() -> None:
    assert len((EXAMPLES / "sticky_tenant.py").read_text().splitlines()) <= 30
