"""A request is refused for the probability of a miss, and never before the cluster has tried."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from baton.core.report_parts import StepPrices
from baton.core.types import ClusterView, ErrorBar, Prediction, PredictionErrors, Slo
from baton.decide.policy.admission import BoundedQueue, Reject
from baton.decide.policy.slo_headroom import SloHeadroom
from baton.decide.policy.slo_risk import TRIED_MIN, MissRatios, miss_ratio, refuse_risky
from tests.unit.decide.policy.views import COST, cluster, request, worker

SLO = Slo(ttft_s=1.0, tpot_s=0.05)
BUSY = cluster(worker("p", running_requests=3, queued_tokens=500), worker("d", "decode", running_requests=20))
KNOWN = ErrorBar(0.0, 0.2, 50.0)


def refuse(ttft_s: float, tpot_s: float, view: ClusterView, errors: PredictionErrors) -> Reject | None:
    predicted, seen = Prediction(ttft_s, tpot_s), replace(view, errors=errors)
    bounds = MissRatios(0.3, 0.3)
    return refuse_risky(SLO, predicted, seen, alone=Prediction(0.0), miss_ratios_max=bounds, answer_s=10.0)


def test_without_errors_the_prediction_is_taken_as_exact() -> None:
    assert miss_ratio(0.9, 1.0, ErrorBar()) == 0.0
    assert miss_ratio(1.1, 1.0, ErrorBar()) == 1.0


def test_the_wider_the_error_bar_the_earlier_a_miss_is_likely() -> None:
    assert miss_ratio(1.0, 1.0, KNOWN) == pytest.approx(0.5)
    assert miss_ratio(0.8, 1.0, ErrorBar(0.0, 0.1, 9)) < miss_ratio(0.8, 1.0, ErrorBar(0.0, 0.5, 9)) < 0.5


def test_each_latency_has_its_own_maximum() -> None:
    """Both would be missed with a probability of 40 %."""
    ratio, errors = 0.95, PredictionErrors(KNOWN, KNOWN)
    assert miss_ratio(ratio, 1.0, KNOWN) == pytest.approx(0.4, abs=0.01)
    view = replace(BUSY, errors=errors)

    def refused(predicted: Prediction) -> bool:
        bounds, alone = MissRatios(0.3, 0.5), Prediction(0.0)
        return refuse_risky(SLO, predicted, view, alone=alone, miss_ratios_max=bounds, answer_s=10.0) is not None

    assert refused(Prediction(ratio * SLO.ttft_s, 0.01))
    assert not refused(Prediction(0.1, ratio * SLO.tpot_s))


def test_a_bias_corrects_the_prediction() -> None:
    """Requests took twice as long as predicted: 0.6 s means 1.2 s."""
    assert miss_ratio(0.6, 1.0, ErrorBar(math.log(2.0), 0.1, 50)) > 0.9
    assert miss_ratio(1.5, 1.0, ErrorBar(-math.log(2.0), 0.1, 50)) < 0.1


def test_errors_count_for_the_load_and_not_for_the_time_on_an_idle_worker() -> None:
    """7 ms of a token are its own. Requests of a burst took twice as long as predicted: that doubles the rest only."""
    burst = ErrorBar(math.log(2.0), 0.1, 50, margin_log=0.3)
    assert miss_ratio(0.0072, 0.012, burst) > 0.9
    assert miss_ratio(0.0072, 0.012, burst, 0.007) < 0.01
    assert miss_ratio(0.0072, 0.012, burst, 0.0072) == 0.0
    assert miss_ratio(0.0100, 0.012, burst, 0.007) > 0.9, "the load is predicted to take 3 ms, and may take 8"
    assert miss_ratio(0.0130, 0.012, ErrorBar(), 0.013) == 1.0, "too slow on an idle worker, too"


def test_after_a_burst_of_misses_requests_that_find_little_load_are_taken() -> None:
    """Before, the errors of requests that waited refused a request beside one decode, which meets any such SLO."""
    slo = Slo(ttft_s=3.0, tpot_s=0.02)
    late = PredictionErrors(ErrorBar(0.6, 0.2, 50), ErrorBar(0.6, 0.2, 50))
    view = replace(cluster(worker("p", running_requests=1), worker("d", "decode", running_requests=1)), errors=late)
    assert SloHeadroom().admit(request(slo=slo), view, COST, 0.0) is None


def test_the_refusal_names_the_figures_and_when_the_queue_has_drained() -> None:
    errors = PredictionErrors(KNOWN, KNOWN)
    late = refuse(4.0, 0.01, BUSY, errors)
    assert late is not None
    assert (
        "the first token is predicted after 4.000 s, by recent errors up to 4.886 s, and the SLO is 1 s" in late.reason
    )
    assert late.reason.endswith("; send the request later, or relax its SLO")
    assert late.retry_after_s == pytest.approx(4.0 * math.exp(0.2) - 1.0)
    slow = refuse(0.1, 0.1, BUSY, errors)
    assert slow is not None
    assert "a token is predicted every 0.1000 s" in slow.reason
    assert slow.retry_after_s == pytest.approx(10.0 * (1 - 0.5 / math.exp(0.2)))
    assert refuse(0.5, 0.02, BUSY, errors) is None


def test_an_idle_cluster_takes_every_request() -> None:
    """Whatever is predicted, and whatever earlier predictions missed by."""
    idle, bad = cluster(worker("p"), worker("d", "decode")), ErrorBar(1.5, 0.1, 500)
    assert refuse(1e6, 1e6, idle, PredictionErrors(bad, bad)) is None
    slow = type(COST)(step_overhead_s=100.0, prefill_token_s=10.0)
    assert SloHeadroom().admit(request(slo=SLO), idle, slow, 0.0) is None
    assert BoundedQueue().admit(request(slo=SLO), idle, slow, 0.0) is None


def test_an_idle_worker_takes_requests_until_enough_have_shown_what_it_can_do() -> None:
    view = cluster(worker("p"), worker("d", "decode", running_requests=5))
    few = ErrorBar(0.0, 0.1, TRIED_MIN - 1)
    assert refuse(9.0, 0.01, view, PredictionErrors(few, few)) is None
    assert refuse(9.0, 0.01, view, PredictionErrors(KNOWN, few)) is not None
    view = cluster(worker("p", running_requests=2), worker("d", "decode"))
    assert refuse(0.1, 9.0, view, PredictionErrors(few, few)) is None
    assert refuse(0.1, 9.0, view, PredictionErrors(few, KNOWN)) is not None


def test_the_decode_load_counts_as_it_will_be_when_the_prompt_ends() -> None:
    """Requests that wait for their prompt will decode too: 20 beside the 20 that do make 51 ms a token."""
    tight = Slo(ttft_s=60.0, tpot_s=0.045)
    prefill, decode = worker("p", running_requests=1), worker("d", "decode", running_requests=20)
    alone = cluster(prefill, decode, expected_tokens=1e6)
    assert SloHeadroom().admit(request(slo=tight), alone, COST, 0.0) is None
    queued = worker("p", queued_requests=20, queued_tokens=2000, running_requests=20)
    coming = cluster(queued, decode, expected_tokens=1e6)
    lent = SloHeadroom(mixing_ratio=1.0)
    lent.route(request(slo=tight, prompt_tokens=10**9), [queued], cluster(queued), COST)  # it is busy with prompts
    refused = lent.admit(request(slo=tight), coming, COST, 0.0)
    assert refused is not None
    assert "a token is predicted every 0.05" in refused.reason


def test_answers_that_end_while_the_prompt_waits_do_not_count() -> None:
    """Answers of 10 tokens end within 0.8 s; the prompt needs 1 s."""
    tight = Slo(ttft_s=60.0, tpot_s=0.02)
    decode = worker("d", "decode", running_requests=60)
    busy = worker("p", running_requests=1, queued_tokens=2000)
    short, long = (cluster(busy, decode, expected_tokens=tokens) for tokens in (10, 1e6))
    assert SloHeadroom().admit(request(slo=tight), short, COST, 0.0) is None
    assert SloHeadroom().admit(request(slo=tight, prompt_tokens=100), long, COST, 0.0) is None, "prefill decodes it"


def test_prompts_that_were_routed_at_wrong_prices_do_not_count_for_ever() -> None:
    """By its given prices the first prompt took 1,010 s. The worker has shown that it took a thousandth of that."""
    dear = type(COST)(step_overhead_s=10.0, prefill_token_s=1.0, prefill_pair_s=0.0, decode_request_s=1.0)
    policy, mixed = SloHeadroom(), worker("m", "mixed")
    policy.route(request(slo=SLO), [mixed], cluster(mixed), dear)
    learned = replace(worker("m", "mixed", running_requests=1), prices=StepPrices(0.001, (1.0,) * 5, 0.1, 40))
    asked = request(slo=Slo(ttft_s=10.0, tpot_s=0.05))
    assert policy.admit(asked, cluster(learned), dear, 1.0) is None
