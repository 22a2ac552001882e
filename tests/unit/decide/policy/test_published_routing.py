"""The published formulas, each on a view whose answer was computed by hand."""

from __future__ import annotations

import pytest

from baton.core.types import HostId
from baton.decide.policy.admission import AdmitAll
from baton.decide.policy.routing import Route
from baton.lab.policies.baselines import Colocated, LeastLoad, RandomWorker, RoundRobin, ShortestQueue
from baton.lab.policies.cache_aware import DynamoRouter, GlobalCacheAware, LlmdScorer, SglangRouter
from baton.lab.policies.splitwise import SplitwisePlacement, SplitwiseRouting
from tests.unit.decide.policy.views import COST, cluster, request, worker


def test_random_is_the_same_in_every_run_and_even() -> None:
    workers = [worker(name) for name in "abcd"]
    policy = RandomWorker(seed=1)
    chosen = [policy.route(request(f"r{index}"), workers, cluster(*workers), COST) for index in range(400)]
    assert chosen == [policy.route(request(f"r{index}"), workers, cluster(*workers), COST) for index in range(400)]
    assert all(70 <= chosen.count(view.id) <= 130 for view in workers)
    other = [RandomWorker(seed=2).route(request(f"r{index}"), workers, cluster(*workers), COST) for index in range(400)]
    assert other != chosen


def test_round_robin_takes_turns_in_routing_and_in_placement_apart() -> None:
    workers = [worker("a"), worker("b")]
    view, policy = cluster(*workers), RoundRobin()
    chosen = [
        (policy.route(request(), workers, view, COST), policy.place(request(), None, workers, view, COST))
        for _ in range(3)
    ]
    assert chosen == [("a", "a"), ("b", "b"), ("a", "a")]


def test_the_shortest_queue_is_the_one_with_the_fewest_tokens_not_the_fewest_requests() -> None:
    workers = [worker("long", queued_tokens=9000, queued_requests=1), worker("many", queued_tokens=100)]
    assert ShortestQueue().route(request(), workers, cluster(*workers), COST) == "many"
    busy = [worker("few", running_requests=1), worker("more", running_requests=2)]
    assert LeastLoad().route(request(), busy, cluster(*busy), COST) == "few"


def test_colocated_takes_any_worker_and_keeps_the_answer_there() -> None:
    prefill, decode = worker("p", running_requests=3), worker("d", "decode", running_requests=1)
    chosen = Colocated().route(request(), [prefill], cluster(prefill, decode), COST)
    assert chosen == Route(worker=decode.id, until="end")


def test_take_all_refuses_only_beyond_its_bound() -> None:
    view = cluster(worker("a", running_requests=5))
    assert AdmitAll(requests_max=6).admit(request(), view, COST, 0.0) is None
    refused = AdmitAll(requests_max=5).admit(request(), view, COST, 0.0)
    assert refused is not None
    assert refused.reject == "queue_full"


def test_a_prefix_of_another_host_is_pulled_where_that_is_sooner() -> None:
    """800 of 1,000 tokens lie on `far`. Waiting there takes 0.5 + 0.2 s; pulling them here 0.08 + 0.2 s."""
    far = worker("busy", queued_tokens=490, host="far")
    idle = worker("idle", host="near")
    view = cluster(far, idle, hits={"far": 800})
    assert GlobalCacheAware().route(request(), [far, idle], view, COST) == Route(worker=idle.id, fetch=HostId("far"))
    here = cluster(far, idle, hits={"far": 800, "near": 700})
    assert GlobalCacheAware(balance_ratio=1.5).route(request(), [far, idle], here, COST) == Route(worker=idle.id)


def test_dynamo_adds_prompt_blocks_to_compute_and_blocks_in_use() -> None:
    """Blocks of 16: a: (160 + 320 - 160)/16 + (640 + 320)/16 = 80; b: (0 + 320)/16 + (160 + 320)/16 = 50."""
    a = worker("a", queued_tokens=160, context_tokens=640, host="ha")
    b = worker("b", context_tokens=160, host="hb")
    asked = request(prompt_tokens=320)
    assert DynamoRouter().route(asked, [a, b], cluster(a, b, hits={"ha": 160}), COST) == "b"
    warm = cluster(a, b, hits={"ha": 800})
    assert DynamoRouter().route(asked, [a, b], warm, COST) == "b", "credit stops at the prompt blocks: 60 against 50"
    assert DynamoRouter(overlap_credit=1.0, prefill_load_scale=4.0).route(asked, [a, b], warm, COST) == "a"
    assert DynamoRouter().place(asked, None, [a, b], warm, COST) == "a", "a decode router: 960/16 - 50 = 10 against 30"


@pytest.mark.parametrize(
    ("loads", "hit_tokens", "chosen"),
    [((60, 0), 400, "warm"), ((65, 0), 400, "cold"), ((200, 140), 400, "warm"), ((10, 0), 300, "cold")],
    ids=["match", "uneven", "within-the-ratio", "short-match"],
)
def test_sglang_follows_the_match_unless_the_load_is_uneven(
    loads: tuple[int, int], hit_tokens: int, chosen: str
) -> None:
    """Uneven: more than 64 apart, and 1.5 times as many. A match counts above 0.3 of the prompt of 1,000 tokens."""
    warm = worker("warm", running_requests=loads[0], host="hw")
    cold = worker("cold", running_requests=loads[1], host="hc")
    view = cluster(warm, cold, hits={"hw": hit_tokens})
    assert SglangRouter().route(request(), [warm, cold], view, COST) == chosen


def test_llm_d_weighs_queue_free_kv_and_prefix_two_two_three() -> None:
    """a: 2 * 0 + 2 * 0.5 + 3 * 0.8 = 3.4; b: 2 * 1 + 2 * 1 + 0 = 4. With 900 tokens free, a has 4.2."""
    a = worker("a", queued_tokens=10, queued_requests=4, context_tokens=500, kv_tokens_max=1000, host="ha")
    b = worker("b", kv_tokens_max=1000, host="hb")
    assert LlmdScorer().route(request(), [a, b], cluster(a, b, hits={"ha": 800}), COST) == "b"
    roomy = worker("a", queued_tokens=10, queued_requests=4, context_tokens=100, kv_tokens_max=1000, host="ha")
    assert LlmdScorer().route(request(), [roomy, b], cluster(roomy, b, hits={"ha": 800}), COST) == "a"


def test_splitwise_spills_into_the_mixed_pool_then_borrows_a_token_machine() -> None:
    full = worker("p", queued_tokens=8193)
    lent = worker("lent", "decode", queued_tokens=100, running_requests=2)
    token = worker("token", "decode", running_requests=1)
    route = SplitwiseRouting().route
    free = worker("p", queued_tokens=8192)
    assert route(request(), [free], cluster(free, lent, token), COST) == Route(worker=free.id, until="first_token")
    assert route(request(), [full], cluster(full, lent, token), COST) == Route(worker=lent.id, until="first_token")
    assert route(request(), [full], cluster(full, token), COST) == Route(worker=token.id, until="first_token")
    mixed = worker("m", "mixed")
    assert route(request(), [full], cluster(full, mixed, token), COST) == Route(worker=mixed.id, until="end")


def test_splitwise_places_where_least_kv_is_used_and_borrows_a_prompt_machine_when_no_room_is_left() -> None:
    asked = request(prompt_tokens=100)
    small = worker("small", "decode", context_tokens=50, running_requests=9, kv_tokens_max=1000)
    large = worker("large", "decode", context_tokens=500, running_requests=1, kv_tokens_max=1000)
    prompt = worker("p", kv_tokens_max=1000)
    place = SplitwisePlacement().place
    assert place(asked, None, [small, large], cluster(prompt, small, large), COST) == "small"
    full = worker("full", "decode", context_tokens=950, running_requests=9, kv_tokens_max=1000)
    assert place(asked, None, [full], cluster(prompt, full), COST) == "p"
