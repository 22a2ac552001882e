"""Workers whose wires differ: a handoff is predicted at the slower end's, whatever the order of the kinds."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from baton.core.ports import CostModel, handoff_between_s
from baton.core.types import Role, WorkerView
from baton.decide.cost.load import HeterogeneousCost
from baton.decide.policy.placement import FastestStep, PlacementPolicy
from baton.decide.policy.predictions import first_token_delay_s
from baton.decide.policy.routing import Route, RoutingPolicy
from baton.decide.policy.slo_headroom import SloHeadroom
from baton.lab.policies.cache_aware import GlobalCacheAware
from tests.unit.decide.policy.views import COST, cluster, request, worker

FAST = COST
SLOW = replace(COST, handoff_token_s=0.01, step_overhead_s=0.009)
"""Its steps are a little shorter, its wire is a hundred times as slow: 1,000 tokens take 10 s."""
ORDERS = [{"fast": FAST, "slow": SLOW}, {"slow": SLOW, "fast": FAST}]


@pytest.fixture(params=ORDERS, ids=["fast first", "slow first"])
def cost(request: pytest.FixtureRequest) -> CostModel:
    return HeterogeneousCost(kinds=request.param)


def alone(name: str, kind: str, role: Role = "prefill", *, queued_tokens: int = 0) -> WorkerView:
    """A worker on a host of its own."""
    return replace(worker(name, role, host=f"of-{name}", queued_tokens=queued_tokens), kind=kind)


def test_a_handoff_takes_as_long_as_its_slower_end(cost: CostModel) -> None:
    def way_s(*kinds: str) -> float:
        return handoff_between_s(cost, kinds, tokens=1000, same_host=False)

    assert way_s("fast", "fast") == pytest.approx(0.1)
    assert way_s("fast", "slow") == way_s("slow", "fast") == way_s("slow", "slow") == pytest.approx(10.0)
    assert way_s() == cost.handoff_s(tokens=1000, same_host=False) == pytest.approx(10.0), "the two ends are not known"


@pytest.mark.parametrize("policy", [FastestStep(), SloHeadroom()])
def test_decode_goes_where_the_wires_of_both_ends_are_fast(policy: PlacementPolicy, cost: CostModel) -> None:
    """A step of the slow wire's worker is 1 ms shorter, which is worth it only where the way is as long to either."""
    near, far = alone("near", "fast", "decode"), alone("far", "slow", "decode")
    source, other = alone("p", "fast"), alone("q", "slow")
    for prompts, chosen in ((source, near), (other, far)):
        view = cluster(source, other, near, far)
        assert policy.place(request(), prompts.host, (near, far), view, cost) == chosen.id


@pytest.mark.parametrize("policy", [GlobalCacheAware(), SloHeadroom()])
@pytest.mark.parametrize(("holder", "chosen"), [("fast", "idle"), ("slow", "busy")])
def test_a_prefix_is_fetched_where_both_wires_are_fast(
    policy: RoutingPolicy, holder: str, chosen: str, cost: CostModel
) -> None:
    """The host with the prefix is busy for 3 s. A fetch of 9,000 tokens takes 0.9 s, or 90 s if one end is slow."""
    busy, idle = alone("busy", holder, queued_tokens=3000), alone("idle", "fast")
    view = cluster(busy, idle, hits={busy.host: 9000})
    asked = request(prompt_tokens=10_000)
    route = policy.route(asked, (busy, idle), view, cost)
    assert (route.worker if isinstance(route, Route) else route) == chosen


def test_what_lies_before_the_first_token_is_the_way_to_the_nearest_that_decodes(cost: CostModel) -> None:
    def left_s(prompts: str, *decoders: str) -> float:
        workers = [alone(f"d{place}", kind, "decode") for place, kind in enumerate(decoders)]
        view = replace(cluster(*workers), first_token_by="decode")
        return first_token_delay_s(alone("p", prompts), request(), view, cost, prompt_s=1.0)

    assert left_s("fast", "fast") == pytest.approx(0.0999 + 0.011)
    assert left_s("fast", "slow") == pytest.approx(9.99 + 0.010)
    assert left_s("slow", "fast") == pytest.approx(9.99 + 0.011)
    assert left_s("fast", "slow", "fast") == pytest.approx(0.0999 + 0.010), "the shortest way, and the shortest step"
