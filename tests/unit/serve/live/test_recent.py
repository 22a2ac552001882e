"""What one sample of the history collects, and its bounds."""

from __future__ import annotations

from baton.core.types import Request, RequestId
from baton.decide.metrics import catalog
from baton.serve.live.live_request import Finish, LiveRequest
from baton.serve.live.metrics_registry import Metrics
from baton.serve.live.recent import NAMES_MAX, OTHER, REQUESTS_MAX, VALUES_MAX, Recent, Spread, ended_request, spreads
from baton.serve.live.recorder import OTHER_TENANTS, TENANTS_MAX, Recorder


def live_request(name: str, tenant: str = "") -> LiveRequest:
    request = Request(id=RequestId(name), prompt_tokens=3, output_tokens_max=5, arrived_at_s=0.0, tenant=tenant)
    return LiveRequest(request, [1, 2, 3])


def test_percentiles_use_earlier_samples_until_there_are_enough_values() -> None:
    recent, earlier = Recent(), {"ttft": [1000.0], "itl": [2.0, 1.0], "queue": []}
    for value in range(100, 0, -1):
        recent.value("ttft", value)
    recent.value("itl", 3.0)
    assert spreads([recent.latencies, earlier]) == {
        "ttft": Spread(p50=50, p90=90, p99=99),
        "itl": Spread(p50=2.0, p90=3.0, p99=3.0),
    }


def test_a_percentile_is_the_lowest_value_that_enough_values_do_not_exceed() -> None:
    assert spreads([{"ttft": [5.0, 0.1]}]) == {"ttft": Spread(p50=0.1, p90=5.0, p99=5.0)}
    assert spreads([{"itl": [float(value) for value in range(10)]}]) == {"itl": Spread(p50=4.0, p90=8.0, p99=9.0)}


def test_values_requests_and_names_are_bounded() -> None:
    recent = Recent()
    for number in range(VALUES_MAX + 10):
        recent.value("itl", number)
        recent.tokens_sent(live_request("r", tenant=f"tenant-{number}"), 2)
        recent.closed(Finish(outcome="rejected", reject="share"))
        recent.show(ended_request(live_request(f"r-{number}"), Finish(outcome="rejected", reject="share"), 1.0))
    assert len(recent.latencies["itl"]) == VALUES_MAX
    assert len(recent.tenants) == NAMES_MAX + 1
    assert recent.tenants[OTHER] == 2 * (VALUES_MAX + 10 - NAMES_MAX)
    assert recent.classes == {"": 2 * (VALUES_MAX + 10)}
    assert len(recent.ended) == REQUESTS_MAX
    assert recent.rejected["share"] == recent.counts["rejected"] == VALUES_MAX + 10


def test_tenants_with_metrics_of_their_own_are_bounded() -> None:
    metrics = Metrics()
    recorder = Recorder(metrics)
    for number in range(TENANTS_MAX + 10):
        recorder.closed(live_request("r", tenant=f"tenant-{number}"), Finish(outcome="failed"))
    series = metrics.series(catalog.TENANT_REQUESTS)
    assert len(series) == TENANTS_MAX + 1
    assert series[OTHER_TENANTS, "failed"].sum == 10
