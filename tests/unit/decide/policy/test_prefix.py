"""What lies in a tier is no free hit: it is read as far as that pays, and predictions count the time."""

from __future__ import annotations

import msgspec
import pytest

from baton.core.types import ClusterView, HostId, Slo, TierHit
from baton.decide.policy.admission import AdmitAll, BoundedQueue, Reject
from baton.decide.policy.prefix import best_prefix
from baton.decide.policy.routing import EarliestFirstToken, RoutingPolicy
from baton.decide.policy.slo_headroom import SloHeadroom
from baton.lab.policies.cache_aware import GlobalCacheAware
from tests.unit.decide.policy.views import COST, TRIED, cluster, request, worker

BUSY = worker("d", "decode", running_requests=1)
"""With a request somewhere in the cluster, predictions may refuse another one."""

ROUTERS = (EarliestFirstToken(), GlobalCacheAware(), SloHeadroom())


def below(view: ClusterView, **hits: tuple[TierHit, ...]) -> ClusterView:
    return msgspec.structs.replace(view, tier_hits={HostId(host): found for host, found in hits.items()})


def test_reading_that_is_dearer_than_computing_is_not_done() -> None:
    """900 tokens take 0.9 s to compute."""
    assert best_prefix(request().prompt_tokens, 0, [TierHit(900, 0.8)], COST).tokens == 900
    assert best_prefix(request().prompt_tokens, 0, [TierHit(900, 1.0)], COST).tokens == 0


def test_a_prefix_is_read_as_far_as_it_pays() -> None:
    """400 tokens from a fast tier in 0.1 s, and 500 more from a slow one, which would take 2 s."""
    found = best_prefix(request().prompt_tokens, 100, [TierHit(500, 0.1), TierHit(1000 - 1, 2.0)], COST)
    assert (found.tokens, found.load_s) == (500, 0.1)
    assert found.ttft_s == pytest.approx(0.1 + 0.01 + 0.5)


def test_what_is_read_while_others_are_computed_costs_nothing() -> None:
    """1 s of reading for 0.9 s of computing: not on an idle worker, but behind a queue of a second."""
    found = best_prefix(request().prompt_tokens, 0, [TierHit(900, 1.0)], COST, wait_s=1.0)
    assert (found.tokens, found.ttft_s) == (900, pytest.approx(1.0 + 0.01 + 0.1))


def test_where_nothing_is_gained_nothing_is_read() -> None:
    assert best_prefix(request().prompt_tokens, 900, [TierHit(900, 0.0)], COST).load_s == 0.0


def test_admission_counts_the_time_of_reading() -> None:
    """A promise of 0.3 s: an arena with 900 of 1000 tokens keeps it, a tier that takes 0.5 s for them does not."""
    asked, policy = request(slo=Slo(ttft_s=0.3, tpot_s=1.0)), BoundedQueue()
    assert policy.admit(asked, cluster(worker("p"), BUSY, hits={"h": 900}), COST, 0.0) is None
    refused = policy.admit(asked, below(cluster(worker("p"), BUSY), h=(TierHit(900, 0.5),)), COST, 0.0)
    assert isinstance(refused, Reject)
    assert "0.610 s" in refused.reason
    assert policy.admit(asked, below(cluster(worker("p"), BUSY), h=(TierHit(900, 0.1),)), COST, 0.0) is None


def test_admission_by_pressure_counts_it_too() -> None:
    asked, policy = request(slo=Slo(ttft_s=0.3, tpot_s=1.0)), SloHeadroom()
    known = msgspec.structs.replace(cluster(worker("p"), BUSY), errors=TRIED)
    assert policy.admit(asked, below(known, h=(TierHit(900, 0.1),)), COST, 0.0) is None
    assert policy.admit(asked, below(known, h=(TierHit(900, 0.5),)), COST, 0.0) is not None
    assert AdmitAll().admit(asked, below(known, h=(TierHit(900, 0.5),)), COST, 0.0) is None


@pytest.mark.parametrize("router", ROUTERS, ids=lambda router: type(router).__name__)
@pytest.mark.parametrize(("load_s", "chosen"), [(0.01, "b"), (0.6, "a")])
def test_routing_weighs_a_tier_against_an_arena(router: RoutingPolicy, load_s: float, chosen: str) -> None:
    """500 tokens in the arena of one host; 900 in the tier of another: 0.5 s and load_s + 0.1 s."""
    workers = (worker("a", host="near"), worker("b", host="far"))
    seen = below(cluster(*workers, hits={"near": 500}), far=(TierHit(900, load_s),))
    if isinstance(router, GlobalCacheAware):  # it pulls what is in an arena: let that be no option
        seen = msgspec.structs.replace(seen, prefix_hit_tokens={HostId("near"): 500, HostId("far"): 500})
        chosen = "b" if load_s < 0.4 else "a"
    route = router.route(request(), workers, seen, COST)
    assert (route if isinstance(route, str) else route.worker) == chosen
