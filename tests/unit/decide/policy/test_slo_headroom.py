"""Baton's own choices, on views whose pressures were computed by hand (see `views.COST`)."""

from __future__ import annotations

from msgspec.structs import replace

from baton.core.types import BoundLoad, HostId, Slo, WorkerView
from baton.decide.policy.routing import Route
from baton.decide.policy.slo_headroom import SloHeadroom
from tests.unit.decide.policy.views import COST, cluster, request, worker

SLO = Slo(ttft_s=2.0, tpot_s=0.05)


def test_of_equals_the_worker_of_the_role_is_taken() -> None:
    decode, prefill = worker("a", "decode"), worker("b")
    chosen = SloHeadroom().route(request(slo=SLO), [prefill], cluster(decode, prefill), COST)
    assert replace(chosen, predicted=None) == Route(worker=prefill.id, until="first_token")


def test_a_mixed_worker_hands_off_where_there_are_decode_workers() -> None:
    """Before, an answer stayed where its prompt was computed, and the decode worker had no work."""
    mixed, decode = worker("m", "mixed"), worker("d", "decode")
    for others, until in (((), "end"), ((worker("p"),), "end"), ((decode,), "first_token")):
        route = SloHeadroom().route(request(), [mixed], cluster(mixed, *others), COST)
        assert (route.worker, route.until) == ("m", until)


def test_a_later_turn_stays_with_its_decoder_unless_that_is_late() -> None:
    """Of 1,000 tokens the decoder's host has 900. There: 0.14 s. On the prefill worker: 0.20 s."""
    prefill, decoder = worker("p", host="a"), worker("d", "decode", host="b", running_requests=4, context_tokens=400)
    turn, hits = request(), {"a": 300, "b": 900}

    def chosen(*workers: WorkerView, hits: dict[str, int] = hits, slo: Slo | None = None, pins: bool = True) -> str:
        view = cluster(*workers, hits=hits)
        return SloHeadroom(pins_turns=pins).route(replace(turn, slo=slo), [prefill], view, COST).worker

    assert chosen(prefill, decoder) == "d"
    assert chosen(prefill, decoder, pins=False) == "p"
    assert chosen(prefill, worker("d", "decode", host="b", queued_tokens=300)) == "p", "its queue takes longer"
    assert chosen(prefill, decoder, hits={"a": 300, "b": 400}) == "p", "more than half of it is new"
    assert chosen(prefill, decoder, hits={"a": 900, "b": 900}) == "p", "its own host has it, too"


def test_predictions_of_requests_that_ended_before_their_turn_are_dropped_beyond_the_bound() -> None:
    view, policy = cluster(worker("m", "mixed")), SloHeadroom(requests_max=2)
    asked = [request(name, slo=SLO) for name in ("a", "b", "c")]
    assert [policy.admit(each, view, COST, 0.0) for each in asked] == [None, None, None]
    routes = [policy.route(each, view.workers, view, COST) for each in asked]
    assert [route.predicted is not None and route.predicted.tpot_s > 0 for route in routes] == [False, True, True]


def test_a_decode_worker_computes_a_prompt_when_its_own_answers_bear_it() -> None:
    """Prefill: (3.0 + 1.0) / 2 = 2 and more, late. Decode: 2 * max(1 / 2, (0.012 + 1.0 / 200) / 0.05), all kept."""
    behind, decode = worker("p", queued_tokens=3000), worker("d", "decode", running_requests=2)
    chosen = SloHeadroom().route(request(slo=SLO), [behind], cluster(behind, decode), COST)
    assert chosen.worker == "d"
    tight = Slo(ttft_s=2.0, tpot_s=0.010)
    assert SloHeadroom().route(request(slo=tight), [behind], cluster(behind, decode), COST).worker == "p"


def test_a_full_arena_keeps_prompts_away_from_its_decodes() -> None:
    """Beside two decodes 0.69 of the promise, 1.9 times that in a full arena; beside six, on another host, 0.78."""
    behind = worker("p", queued_tokens=3000, kv_tokens_max=100_000)
    empty = worker("d", "decode", running_requests=2, kv_tokens_max=100_000)
    full = worker("d", "decode", running_requests=2, context_tokens=90_000, kv_tokens_max=100_000)
    far = worker("e", "decode", running_requests=6, host="far", kv_tokens_max=100_000)
    assert SloHeadroom().route(request(slo=SLO), [behind], cluster(behind, empty, far), COST).worker == "d"
    assert SloHeadroom().route(request(slo=SLO), [behind], cluster(behind, full, far), COST).worker == "e"


def test_a_prompt_avoids_workers_with_decodes_whatever_their_role() -> None:
    """Prefill: 1.52 s of 2 s. With two decodes: 0.69, which counts twice. Without decodes: 0.5."""
    behind = worker("p", queued_tokens=500)
    decodes, free = worker("d", "decode", running_requests=2), worker("e", "decode")
    route = SloHeadroom().route
    assert route(request(slo=SLO), [behind], cluster(behind, decodes), COST).worker == "p"
    assert route(request(slo=SLO), [behind], cluster(behind, decodes, free), COST).worker == "e"
    weighless = SloHeadroom(mixing_ratio=1.0).route(request(slo=SLO), [behind], cluster(behind, decodes), COST)
    assert weighless.worker == "d"


def test_a_decode_worker_is_left_to_answers_that_are_under_more_pressure_than_prompts() -> None:
    """TTFT: 1.21 s of 4 s on the prefill worker, 1.01 s on the decode worker. An answer there: 11 ms of 30 or 50."""
    behind, decode = worker("p", queued_tokens=200), worker("d", "decode")
    view = cluster(behind, decode)
    for tpot_s, chosen in ((0.03, "p"), (0.05, "d")):
        asked = request(slo=Slo(ttft_s=4.0, tpot_s=tpot_s))
        assert SloHeadroom().route(asked, [behind], view, COST).worker == chosen
        weighed = SloHeadroom().weigh_prompt(asked, [behind], view, COST)
        assert min(weighed, key=lambda each: each.key).worker == chosen


def test_a_plan_that_meets_every_slo_precedes_one_with_less_pressure() -> None:
    """Prefill: 1.97 s of 2, past the slack. Decode keeps all, though 2 * (1 + 0.2) * 0.69 = 1.66 weighs more."""
    behind = worker("p", queued_tokens=950, kv_tokens_max=100_000)
    full = worker("d", "decode", running_requests=2, context_tokens=20_000, kv_tokens_max=100_000)
    view = cluster(behind, full)
    assert SloHeadroom().admit(request(slo=SLO), view, COST, 0.0) is None
    assert SloHeadroom().route(request(slo=SLO), [behind], view, COST).worker == "d"


def test_what_a_prompt_costs_answers_is_shared_out_over_their_length_not_over_that_of_the_next() -> None:
    """Answers of 500 tokens decode. A prompt of a second for an answer of 10 costs them 2 ms a token, not 100."""
    slo = Slo(ttft_s=2.0, tpot_s=0.1)
    policy = SloHeadroom()
    idle, behind = worker("d", "decode"), worker("p", queued_tokens=850)
    policy.place(request(slo=slo), None, [idle], cluster(idle, behind, expected_tokens=500), COST)
    busy = worker("d", "decode", running_requests=1)
    view = cluster(behind, busy, expected_tokens=10)
    assert policy.route(request(slo=slo), [behind], view, COST).worker == "d"
    unaware = SloHeadroom().route(request(slo=slo), [behind], view, COST)
    assert unaware.worker == "p", "were they as short as that, it would be 100 ms a token"


def test_with_decodes_a_prompt_uses_the_step_time_that_their_slo_leaves() -> None:
    """Steps of 45 ms, 12 of which decode: 33 tokens each. 1,000 of them take 1.0 s, and 31 times those 12 ms."""
    busy = worker("d", "decode", running_requests=2)
    bears = Slo(ttft_s=1.5, tpot_s=0.05)
    assert SloHeadroom().admit(request(slo=bears), cluster(busy), COST, 0.0) is None
    refused = SloHeadroom().admit(request(slo=Slo(ttft_s=1.3, tpot_s=0.05)), cluster(busy), COST, 0.0)
    assert refused is not None
    assert "the first token is predicted after 1.4" in refused.reason


def test_prompts_given_to_a_decode_worker_add_up_until_its_answers_bear_no_more() -> None:
    """Each second of prompts beside answers of 200 tokens costs them 5 ms a token, however the queue drains.

    On p, the first token takes 0.93 of its SLO.
    """
    behind, decode = worker("p", queued_tokens=850), worker("d", "decode", running_requests=2)
    policy = SloHeadroom(mixing_ratio=1.0)
    chosen = [policy.route(request(slo=SLO), [behind], cluster(behind, decode), COST).worker for _ in range(20)]
    assert chosen[0] == "d"
    assert chosen[-1] == "p"


def test_a_request_that_would_be_late_everywhere_is_refused() -> None:
    view = cluster(worker("p", queued_tokens=2000), worker("d", "decode", queued_tokens=2000))
    refused = SloHeadroom().admit(request(slo=SLO), view, COST, 0.0)
    assert refused is not None
    assert refused.reject == "slo"
    free = cluster(worker("p", queued_tokens=2000), worker("d", "decode"))
    assert SloHeadroom().admit(request(slo=SLO), free, COST, 0.0) is None


def test_a_request_whose_tokens_would_be_slow_everywhere_is_refused() -> None:
    """50 requests: 10 + 51 ms a step."""
    view = cluster(worker("p"), worker("d", "decode", running_requests=50))
    assert SloHeadroom().admit(request(slo=SLO), view, COST, 0.0) is None, "the prefill worker decodes it"
    full = cluster(worker("d", "decode", running_requests=50), expected_tokens=1e9)
    refused = SloHeadroom().admit(request(slo=Slo(ttft_s=9.0, tpot_s=0.05)), full, COST, 0.0)
    assert refused is not None
    assert "a token is predicted every 0.0610 s" in refused.reason


def test_a_longer_prefix_is_pulled_only_where_that_is_faster_than_computing_it() -> None:
    near = worker("near", host="near")
    view = cluster(near, hits={"far": 900})
    assert SloHeadroom().route(request(), [near], view, COST).fetch == HostId("far")
    slow = type(COST)(step_overhead_s=0.01, prefill_token_s=0.001, handoff_token_s=0.01)
    assert SloHeadroom().route(request(), [near], view, slow).fetch is None
    assert SloHeadroom(fetches=False).route(request(), [near], view, COST).fetch is None


def test_decode_goes_where_tokens_come_fastest_and_kv_has_room() -> None:
    idle, busy = worker("idle", "decode"), worker("busy", "decode", running_requests=9)
    place = SloHeadroom().place
    assert place(request(slo=SLO), None, [idle, busy], cluster(idle, busy), COST) == "idle"
    full = worker("idle", "decode", context_tokens=500, kv_tokens_max=1000)
    assert place(request(slo=SLO), None, [full, busy], cluster(full, busy), COST) == "busy"


def test_a_prefill_worker_decodes_only_where_the_others_are_near_their_limit() -> None:
    """An idle prefill worker: 11 ms a token. A decode worker with thirty: 41 ms of 50, with forty: 51 ms."""
    idle, busy = worker("p"), worker("d", "decode", running_requests=30)
    assert SloHeadroom().place(request(slo=SLO), None, [busy], cluster(idle, busy), COST) == "d"
    slow = worker("d", "decode", running_requests=40)
    assert SloHeadroom().place(request(slo=SLO), None, [slow], cluster(idle, slow), COST) == "p"
    assert SloHeadroom(lends_above=0.5).place(request(slo=SLO), None, [busy], cluster(idle, busy), COST) == "p"


def test_no_answer_is_lent_where_the_next_prompt_would_be_late() -> None:
    """A prompt of 1 s beside a decode takes 1.3 s, of 2 s or of 1.2. On d, a token takes 51 ms of 50."""
    prefill, slow = worker("p"), worker("d", "decode", running_requests=40)

    def chosen(ttft_s: float) -> str:
        policy, slo = SloHeadroom(mixing_ratio=1.0), Slo(ttft_s=ttft_s, tpot_s=0.05)
        policy.route(request(slo=slo), [prefill], cluster(prefill), COST)
        return policy.place(request(slo=slo), None, [slow], cluster(prefill, slow), COST)

    assert [chosen(2.0), chosen(1.2)] == ["p", "d"]


def test_an_answer_weighs_more_where_prompts_take_more_of_the_time() -> None:
    """Beside d's 38: 49 ms, more than 0.9 of the SLO. Beside the prompts: 11 ms, and 5 for each second of prompts."""
    prefill, decode = worker("p"), worker("d", "decode", running_requests=38)
    view, slo = cluster(prefill, decode), Slo(ttft_s=20.0, tpot_s=0.05)

    def after(seconds: int, mixing_ratio: float = 2.0) -> str:
        policy = SloHeadroom(mixing_ratio=mixing_ratio)
        for _ in range(seconds):
            policy.route(request(slo=slo), [prefill], cluster(prefill), COST)
        return policy.place(request(slo=slo), None, [decode], view, COST)

    assert [after(0), after(2), after(6)] == ["p", "p", "d"]
    assert after(2, mixing_ratio=9.0) == "d"


def test_a_mixed_worker_hands_off_an_answer_only_if_it_cannot_decode_it_well() -> None:
    """The arena of m holds 1,400 tokens, its answers have 500, and the prompt 1,000. On n, prompts wait for 3 s."""
    small = worker("m", "mixed", running_requests=2, context_tokens=500, kv_tokens_max=1400)
    busy, idle = worker("n", "mixed", host="b", queued_tokens=3000), worker("n", "mixed", host="b", running_requests=1)

    def until(own: WorkerView, other: WorkerView, *, hands_off: bool = True) -> tuple[str, str | None]:
        route = SloHeadroom(hands_off=hands_off).route(request(slo=SLO), [own], cluster(own, other), COST)
        return route.worker, route.until

    assert until(small, busy) == ("m", "first_token")
    assert until(small, busy, hands_off=False) == ("m", "end")
    assert until(worker("m", "mixed"), idle) == ("m", "end")


def test_on_a_decode_worker_prompts_weigh_no_more_than_they_slow_its_answers() -> None:
    """Prompts of 1 s there: 5 ms, so 16 ms a token. Beside six others: 17 ms. Weighed as on p it would be 17.6."""
    lends, other = worker("d", "decode"), worker("e", "decode", running_requests=6)
    policy = SloHeadroom()
    policy.route(request(slo=SLO), [lends], cluster(lends), COST)
    assert policy.place(request(slo=SLO), None, [lends, other], cluster(lends, other), COST) == "d"


def test_an_answer_does_not_slow_prompts_that_wait_until_their_first_token_is_late() -> None:
    """Alone the prompts that wait take 1.5 s of the 2; beside a decode 41 steps more, of 11 ms: 1.96 s, too close."""
    prefill, decode = worker("p", queued_tokens=1500), worker("d", "decode", running_requests=38)
    place = SloHeadroom().place
    assert place(request(slo=SLO), None, [decode], cluster(prefill, decode), COST) == "d"
    patient = Slo(ttft_s=4.0, tpot_s=0.05)
    assert place(request(slo=patient), None, [decode], cluster(prefill, decode), COST) == "p"


def test_an_answer_joins_a_full_batch_while_turns_keep_its_tpot() -> None:
    """Beside eight: 19 ms a token, 21 in turns with eight places, 86 with two. Beside twelve: 23 ms. On p: 10 ms."""
    crowded, slower = worker("d", "decode", running_requests=8), worker("e", "decode", running_requests=12)
    prefill, place = worker("p"), SloHeadroom().place
    full, fuller = replace(crowded, requests_max=8), replace(crowded, requests_max=2)
    assert place(request(slo=SLO), None, [full], cluster(full, slower), COST) == "d"
    assert place(request(slo=SLO), None, [full], cluster(full, prefill), COST) == "d", "p is for prompts"
    assert place(request(slo=SLO), None, [fuller], cluster(fuller, slower), COST) == "e"
    assert place(request(slo=SLO), None, [fuller], cluster(fuller, prefill), COST) == "p"


def test_of_a_prompt_beside_decodes_only_what_it_adds_to_their_steps_costs_them() -> None:
    """Steps of 60 ms, 12 of which decode: a prompt takes 21 of them, 1.25 s, and answers wait for 1.0 s of that.

    Shared out over 200 tokens it is 5 ms, and ten prompts make 62 ms, less pressure than on p, which equals 63 ms. It
    would be eight, were it 1.25 s.
    """
    slo = Slo(ttft_s=30.0, tpot_s=0.0667)
    busy, behind = worker("d", "decode", running_requests=2), worker("p", queued_tokens=27_400)
    policy, chosen = SloHeadroom(mixing_ratio=1.0), list[str]()
    for _ in range(14):
        chosen.append(policy.route(request(slo=slo), [behind], cluster(behind, busy), COST).worker)
    assert chosen.count("d") == 10


def test_a_full_arena_makes_a_request_wait_for_answers_to_end() -> None:
    """9,500 tokens are used; 9,000 are given back over 200 tokens of 19 ms: 600 too many take 600 / (9,000 / 3.8) s."""
    full = worker("d", "mixed", running_requests=9, context_tokens=9500, kv_tokens_max=10_000)
    tight = Slo(ttft_s=2.0, tpot_s=0.05)
    refused = SloHeadroom().admit(request(slo=tight), cluster(full), COST, 0.0)
    assert refused is not None
    roomy = worker("d", "mixed", running_requests=9, context_tokens=8000, kv_tokens_max=10_000)
    assert SloHeadroom().admit(request(slo=tight), cluster(roomy), COST, 0.0) is None


def test_a_prompt_waits_for_a_place_in_a_full_batch() -> None:
    """130 decode where 128 have a place: three of them have to end, each of 200 tokens of 0.14 s: 0.66 s more."""
    promise = Slo(ttft_s=1.5, tpot_s=9.0)
    crowded = replace(worker("d", "decode", running_requests=130), requests_max=128)
    refused = SloHeadroom().admit(request(slo=promise), cluster(crowded), COST, 0.0)
    assert refused is not None
    assert refused.reason.startswith("the first token")
    roomy = replace(crowded, requests_max=256)
    assert SloHeadroom().admit(request(slo=promise), cluster(roomy), COST, 0.0) is None


def test_bound_requests_count_in_admission_and_routing() -> None:
    """No request decodes on d yet. Two bound requests will have steps of 12 ms, too long to add a prompt of 1 s."""
    behind, decode = worker("p", queued_tokens=850), worker("d", "decode")
    tight = Slo(ttft_s=2.0, tpot_s=0.013)
    alone, soon = cluster(behind, decode), replace(cluster(behind, decode), bound={decode.id: BoundLoad(2, 0)})
    assert SloHeadroom().route(request(slo=tight), [behind], alone, COST).worker == "d"
    assert SloHeadroom().route(request(slo=tight), [behind], soon, COST).worker == "p"
    full = replace(cluster(worker("d", "mixed")), bound={decode.id: BoundLoad(4, 0)})
    assert SloHeadroom().admit(request(slo=tight), cluster(worker("d", "mixed")), COST, 0.0) is None
    assert SloHeadroom().admit(request(slo=tight), full, COST, 0.0) is not None


def test_the_target_of_streamed_kv_decodes_unless_it_misses_the_slo() -> None:
    """One decode more there costs 1 ms a token, and keeps the promise: elsewhere the KV would be copied again."""
    there, idle = worker("d", "decode", running_requests=1, host="a"), worker("e", "decode", host="b")
    ahead, whole = replace(cluster(there, idle), is_sent_ahead=True), cluster(there, idle)
    place = SloHeadroom().place
    assert place(request(slo=SLO), HostId("p"), [there], ahead, COST) == "d"
    assert place(request(slo=SLO), HostId("p"), [there, idle], ahead, COST) == "e", "nothing has gone anywhere yet"
    assert place(request(slo=SLO), HostId("p"), [there], whole, COST) == "e", "nothing goes ahead"
    slow = replace(there, running_requests=200)
    assert place(request(slo=SLO), HostId("p"), [slow], replace(cluster(slow, idle), is_sent_ahead=True), COST) == "e"
