"""What one sample of the history collects, and its bounds."""

from __future__ import annotations

from baton.core.types import Request, RequestId
from baton.serve.live.live_request import Finish, LiveRequest
from baton.serve.live.recent import NAMES_MAX, OTHER, REQUESTS_MAX, VALUES_MAX, Recent, Spread


def live_request(name: str, tenant: str = "") -> LiveRequest:
    request = Request(id=RequestId(name), prompt_tokens=3, output_tokens_max=5, arrived_at_s=0.0, tenant=tenant)
    return LiveRequest(request, [1, 2, 3])


def test_percentiles_are_of_the_values_since_the_last_sample() -> None:
    recent = Recent()
    for value in range(100, 0, -1):
        recent.value("ttft", value)
    assert recent.spread("ttft") == Spread(p50=51, p90=91, p99=100)
    assert recent.spread("itl") is None


def test_values_requests_and_names_are_bounded() -> None:
    recent = Recent()
    for number in range(VALUES_MAX + 10):
        recent.value("itl", number)
        recent.tokens_sent(live_request("r", tenant=f"tenant-{number}"), 2)
        recent.closed(Finish(outcome="rejected", reject="share"))
        recent.show(live_request(f"r-{number}"), Finish(outcome="rejected", reject="share"), 1.0)
    assert len(recent.latencies["itl"]) == VALUES_MAX
    assert len(recent.tenants) == NAMES_MAX + 1
    assert recent.tenants[OTHER] == 2 * (VALUES_MAX + 10 - NAMES_MAX)
    assert recent.classes == {"": 2 * (VALUES_MAX + 10)}
    assert len(recent.ended) == REQUESTS_MAX
    assert recent.rejected["share"] == recent.counts["rejected"] == VALUES_MAX + 10
