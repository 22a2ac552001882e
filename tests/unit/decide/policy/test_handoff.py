"""Which way KV goes: direct, unless what was measured says otherwise."""

from __future__ import annotations

import math

import pytest

from baton.core.handoff_paths import HandoffView, LinkView
from baton.core.types import Request, RequestId
from baton.decide.control.link_estimates import FORGET_S, LinkEstimates, tier_link
from baton.decide.cost.linear import LinearCost
from baton.decide.policy.handoff import CheapestHandoff, DirectHandoff, PoolHandoff

REQUEST = Request(id=RequestId("r"), prompt_tokens=1000, output_tokens_max=10, arrived_at_s=0.0)


def road(expected_s: float, *, is_measured: bool = True, failed_ago_s: float = math.inf) -> LinkView:
    return LinkView(expected_s=expected_s, is_measured=is_measured, failed_ago_s=failed_ago_s)


def handoff(
    direct: LinkView, put: LinkView, get: LinkView, *, rest_s: float = 0.0, run_ratio: float = 1.0
) -> HandoffView:
    """All of it goes in one run, if nothing else is said: the take begins when the put has ended."""
    return HandoffView(
        request=REQUEST,
        tokens=1000,
        pooled_tokens=0,
        direct=direct,
        put=put,
        get=get,
        run_ratio=run_ratio,
        rest_s=rest_s,
    )


def test_in_runs_the_shorter_stretch_is_behind_the_longer() -> None:
    """0.6 s and 0.5 s one after the other are too long; in tenths, 0.05 s of the shorter one is left."""
    policy = CheapestHandoff(gain_ratio=0.8)
    assert policy.choose_path(handoff(road(1.0), road(0.6), road(0.5))) == "direct"
    assert policy.choose_path(handoff(road(1.0), road(0.6), road(0.5), run_ratio=0.1)) == "central"
    assert policy.choose_path(handoff(road(1.0), road(0.5), road(0.6), run_ratio=0.1)) == "central"


def test_the_pool_has_to_be_clearly_quicker() -> None:
    policy = CheapestHandoff(gain_ratio=0.8)
    assert policy.choose_path(handoff(road(1.0), road(0.4), road(0.3))) == "central"
    assert policy.choose_path(handoff(road(1.0), road(0.5), road(0.4))) == "direct"
    assert policy.choose_path(handoff(road(1.0), road(0.4), road(0.3), rest_s=0.2)) == "direct", "the rest is computed"


def test_what_lies_in_the_pool_anyway_need_not_be_put() -> None:
    assert CheapestHandoff().choose_path(handoff(road(1.0), road(0.0), road(0.7))) == "central"


def test_nothing_is_sent_round_on_a_guess() -> None:
    """A direct path without measurements is used, which measures it."""
    assert CheapestHandoff().choose_path(handoff(road(1.0, is_measured=False), road(0.1), road(0.1))) == "direct"


def test_a_way_that_failed_lately_is_avoided_while_the_other_is_well() -> None:
    policy = CheapestHandoff(avoid_s=10.0)
    ill, well, slow = road(0.1, failed_ago_s=9.0), road(0.1, failed_ago_s=11.0), road(5.0)
    assert policy.choose_path(handoff(ill, slow, slow)) == "central"
    assert policy.choose_path(handoff(well, slow, slow)) == "direct"
    assert policy.choose_path(handoff(ill, road(0.1, failed_ago_s=1.0), slow)) == "direct"
    assert policy.choose_path(handoff(slow, road(0.1, failed_ago_s=1.0), road(0.1))) == "direct"


def test_two_policies_know_one_way() -> None:
    costs = handoff(road(1.0), road(0.1), road(0.1))
    assert (DirectHandoff().choose_path(costs), PoolHandoff().choose_path(costs)) == ("direct", "central")


def alone_s(tokens: int) -> float:
    return 0.001 * tokens


def test_a_road_that_is_slower_than_configured_is_predicted_slower() -> None:
    links, wire = LinkEstimates(pools={}, cost=LinearCost()), ("a", "b")
    assert links.view(wire, 100, alone_s, 0.0) == LinkView(expected_s=0.1, is_measured=False)
    links.begin("one", wire, 100, alone_s, 0.0)
    links.end("one", landed=True, now_s=0.3)
    assert links.view(wire, 100, alone_s, 0.3).expected_s == pytest.approx(0.3)
    assert links.view(("b", "a"), 100, alone_s, 0.3).expected_s == 0.1, "the way back is another one"


def test_what_was_slow_once_is_tried_again() -> None:
    """Nothing goes by a slow way, so nothing shows that it is well again: its slowness is forgotten by and by."""
    links, wire = LinkEstimates(pools={}, cost=LinearCost()), ("a", "b")
    links.begin("one", wire, 100, alone_s, 0.0)
    links.end("one", landed=True, now_s=10.0)
    later_s = [links.view(wire, 100, alone_s, 10.0 + ago_s).expected_s for ago_s in (0.0, FORGET_S, 10 * FORGET_S)]
    assert later_s == pytest.approx([10.0, 0.1 + 9.9 / math.e, 0.1], rel=0.01)
    links.begin("two", wire, 100, alone_s, 400.0)
    links.end("two", landed=True, now_s=400.1)
    assert links.view(wire, 100, alone_s, 400.1).expected_s == pytest.approx(0.1, rel=0.01), "nor counts it later"


def test_what_is_under_way_is_waited_for_and_not_measured_twice() -> None:
    """Two copies side by side take twice as long as one: the road is as fast as it was."""
    links, wire = LinkEstimates(pools={}, cost=LinearCost()), ("a", "b")
    links.begin("one", wire, 100, alone_s, 0.0)
    assert links.view(wire, 100, alone_s, 0.0).expected_s == 0.2
    links.begin("two", wire, 100, alone_s, 0.0)
    links.end("one", landed=True, now_s=0.1)
    links.end("two", landed=True, now_s=0.2)
    assert links.view(wire, 100, alone_s, 0.2) == LinkView(expected_s=0.1, is_measured=True)


def test_a_failure_is_remembered_until_something_lands_and_measures_nothing() -> None:
    links, wire = LinkEstimates(pools={}, cost=LinearCost()), ("a", tier_link("pool"))
    links.begin("one", wire, 100, alone_s, 0.0)
    links.end("one", landed=False, now_s=5.0)
    view = links.view(wire, 100, alone_s, 7.0)
    assert (view.expected_s, view.is_measured, view.failed_ago_s) == (0.1, False, 2.0)
    links.begin("two", wire, 100, alone_s, 7.0)
    links.end("two", landed=True, now_s=7.1)
    assert links.view(wire, 100, alone_s, 8.0).failed_ago_s == math.inf


def test_a_host_that_is_lost_is_measured_anew() -> None:
    links, wire = LinkEstimates(pools={}, cost=LinearCost()), ("a", "b")
    links.begin("one", wire, 100, alone_s, 0.0)
    links.lose_host("b")
    links.end("one", landed=False, now_s=5.0)
    assert links.view(wire, 100, alone_s, 5.0) == LinkView(expected_s=0.1, is_measured=False)


def test_nothing_to_move_takes_no_time() -> None:
    links = LinkEstimates(pools={}, cost=LinearCost())
    assert links.view(("a", "b"), 0, lambda tokens: 1.0 + tokens, 0.0).expected_s == 0.0
