"""Admission, placement, roles and moves of the literature, each on a view whose answer was computed by hand."""

from __future__ import annotations

from baton.core.types import FlightView, HostId, LoadWindow, RequestId, Slo, WorkerId
from baton.decide.policy.lengths import RecentMean
from baton.decide.policy.routing import Route
from baton.lab.policies.arrow import ArrowRoles, ArrowRouting
from baton.lab.policies.llumnix import LlumnixMoves, LlumnixRouting, freeness
from baton.lab.policies.mooncake import EarlyRejection, PredictedRejection
from baton.lab.policies.tetriinfer import TetriInferPlacement, TetriInferRoles
from tests.unit.decide.policy.views import COST, cluster, request, worker

SLO = Slo(ttft_s=2.0, tpot_s=0.02)


def test_early_rejection_refuses_a_late_first_token_with_both_numbers() -> None:
    """The queue takes 1 + 0.01 s, the prompt the same: 2.02 s."""
    view = cluster(worker("p", queued_tokens=1000), worker("d", "decode"))
    refused = EarlyRejection().admit(request(slo=SLO), view, COST, 0.0)
    assert refused is not None
    late = "the first token is predicted after 2.020 s, later than the SLO of 2.000 s"
    assert refused.reason == f"{late}; send the request again later"
    assert EarlyRejection().admit(request(), view, COST, 0.0) is None, "nothing was promised"


def test_early_rejection_looks_at_the_decode_load_of_this_moment() -> None:
    """Ten requests and this one: 10 + 11 ms a step, above 20."""
    full, free = worker("d", "decode", running_requests=10), worker("d", "decode", running_requests=9)
    assert EarlyRejection().admit(request(slo=SLO), cluster(worker("p"), full), COST, 0.0) is not None
    assert EarlyRejection().admit(request(slo=SLO), cluster(worker("p"), free), COST, 0.0) is None


def test_prediction_looks_at_the_decode_load_when_the_prompt_will_be_done() -> None:
    """Ten requests decode from 1.01 s on, 100 tokens of up to 20 ms: at that moment an eleventh is one too many.

    The decode worker is idle now, and an early rejection by its present load would take it.
    """
    policy = PredictedRejection()
    view = cluster(worker("p"), worker("d", "decode"), expected_tokens=100.0)
    taken = [policy.admit(request(f"r{index}", slo=SLO), view, COST, 0.0) for index in range(11)]
    assert taken[:10] == [None] * 10
    assert taken[10] is not None
    assert "a token is predicted every 0.0210 s" in taken[10].reason
    assert policy.admit(request("later", slo=SLO), view, COST, 5.0) is None, "they have ended by then"


def test_of_two_workers_the_one_with_fewer_heavy_decodes_is_taken() -> None:
    workers = [worker("a", "decode", running_requests=9), worker("b", "decode", running_requests=9)]
    policy = TetriInferPlacement()
    heavy = [
        policy.place(request(f"h{index}"), None, workers, cluster(*workers, expected_tokens=500.0), COST)
        for index in range(4)
    ]
    assert sorted(heavy) == ["a", "a", "b", "b"], "heavy decodes are spread evenly"


def test_a_worker_without_room_for_the_predicted_answer_is_not_among_the_two() -> None:
    """1,000 tokens of prompt and an answer of 200 to 400: 1,400 tokens have to fit."""
    small = worker("a", "decode", kv_tokens_max=1399)
    large = worker("b", "decode", running_requests=50, kv_tokens_max=1400)
    view = cluster(small, large, expected_tokens=250.0)
    assert TetriInferPlacement().place(request(), None, [small, large], view, COST) == "b"


def test_an_idle_worker_flips_after_a_minute_and_the_last_of_a_role_never() -> None:
    busy = worker("d0", "decode", running_requests=1)
    view = cluster(worker("p0"), worker("p1"), busy)
    policy, window = TetriInferRoles(), [LoadWindow(end_s=0.0, window_s=1.0)]
    assert policy.assign(view, window, COST, 0.0) == {}
    assert policy.assign(view, window, COST, 59.0) == {}
    assert policy.assign(view, window, COST, 60.0) == {"p0": "decode"}
    last = TetriInferRoles(idle_s=0.0)
    assert last.assign(cluster(worker("p0"), busy), window, COST, 0.0) == {}
    idle = cluster(worker("p0"), worker("p1"), worker("d0", "decode"))
    assert last.assign(idle, window, COST, 0.0) == {}, "no worker has work"


def test_arrow_lends_a_decode_worker_when_every_prefill_worker_would_be_late() -> None:
    late, lent = worker("p", queued_tokens=1500), worker("d", "decode", running_requests=1)
    view = cluster(late, lent)
    assert ArrowRouting().route(request(slo=SLO), [late], view, COST) == Route(worker=lent.id, until="first_token")
    relaxed = Slo(ttft_s=3.0, tpot_s=0.02)
    assert ArrowRouting().route(request(slo=relaxed), [late], view, COST) == "p"
    pressed = worker("d", "decode", running_requests=11)
    assert ArrowRouting().route(request(slo=SLO), [late], cluster(late, pressed), COST) == "p"


def test_arrow_moves_one_worker_to_the_side_that_is_late() -> None:
    window = [LoadWindow(end_s=1.0, window_s=1.0, ttft_s=3.0, tpot_s=0.012, slo_ttft_s=2.0, slo_tpot_s=0.1)]
    calm = [worker("d0", "decode", running_requests=5, context_tokens=9), worker("d1", "decode", context_tokens=4)]
    assert ArrowRoles().assign(cluster(worker("p0"), *calm), window, COST, 0.0) == {"d1": "prefill"}
    slow = [LoadWindow(end_s=1.0, window_s=1.0, ttft_s=0.2, tpot_s=0.2, slo_ttft_s=2.0, slo_tpot_s=0.1)]
    two = [worker("p0", queued_tokens=50), worker("p1")]
    assert ArrowRoles().assign(cluster(*two, *calm), slow, COST, 0.0) == {"p1": "decode"}
    assert ArrowRoles().assign(cluster(worker("p0"), *calm), slow, COST, 0.0) == {}, "the last prefill worker stays"


def test_freeness_is_free_kv_per_request_and_a_queue_takes_from_it() -> None:
    assert freeness(worker("a", running_requests=4, context_tokens=600, kv_tokens_max=1000)) == 100
    assert freeness(worker("a", queued_tokens=500, context_tokens=600, kv_tokens_max=1000)) == -100
    free = worker("free", "decode", running_requests=1, context_tokens=500, kv_tokens_max=1000)
    full = worker("full", running_requests=3, context_tokens=500, kv_tokens_max=1000)
    assert LlumnixRouting().route(request(), [full], cluster(full, free), COST) == Route(
        worker=free.id, until="first_token"
    )
    far = worker("far", "decode", kv_tokens_max=1000, host="other")
    here = cluster(full, free, far)
    assert LlumnixRouting().place(request(), HostId("h"), [free, far], here, COST) == free.id, (
        "its KV stays where it is"
    )
    assert LlumnixRouting().place(request(), None, [free, far], here, COST) == far.id


def test_one_request_moves_from_the_least_free_to_the_freest_the_youngest_first() -> None:
    full = worker("full", running_requests=3, context_tokens=900, kv_tokens_max=1000)
    free = worker("free", context_tokens=100, kv_tokens_max=1000)
    flights = [
        FlightView(request=request(name), worker=WorkerId("full"), started_at_s=at_s)
        for name, at_s in (("old", 1.0), ("young", 2.0))
    ]
    assert LlumnixMoves().moves(cluster(full, free), flights, COST, 3.0) == {RequestId("young"): WorkerId("free")}
    assert LlumnixMoves().moves(cluster(full, free), flights[:1], COST, 3.0) == {}, "the only one is left where it is"
    assert LlumnixMoves(source_steps_max=30.0).moves(cluster(full, free), flights, COST, 3.0) == {}


def test_lengths_are_learned_from_answers_of_like_prompts_once_there_are_enough() -> None:
    lengths = RecentMean(recent_max=10, enough=3)
    short, long = request(prompt_tokens=100), request(prompt_tokens=5000)
    assert lengths.expected_tokens(short) == 0
    for _ in range(3):
        lengths.finished(short, 20)
    assert lengths.expected_tokens(short) == 20
    assert lengths.expected_tokens(long) == 20, "all answers, until there are like ones"
    for _ in range(3):
        lengths.finished(long, 400)
    assert (lengths.expected_tokens(short), lengths.expected_tokens(long)) == (20, 400)
    for _ in range(10):
        lengths.finished(short, 50)
    assert lengths.expected_tokens(short) == 50, "old answers are forgotten"
