"""Predictions are compared with what happened, and old errors fade."""

from __future__ import annotations

import math

import pytest

from baton.core.messages import DecodeBegun, PrefillFinished, RequestFailed, RequestFinished
from baton.core.types import ErrorBar, Prediction, Request, RequestId, Slo, Until, WorkerId
from baton.decide.control.flight import Flight
from baton.decide.control.prediction_errors import PredictionMeter

R, W = RequestId("r"), WorkerId("w")


PREDICTED = Prediction(1.0, 0.1)
SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def flight(
    *, predicted: Prediction | None = PREDICTED, until: Until = "first_token", at_s: float = 0.0, slo: Slo | None = SLO
) -> Flight:
    request = Request(id=R, prompt_tokens=10, output_tokens_max=99, arrived_at_s=at_s, slo=slo)
    return Flight(request, predicted=predicted, routed_at_s=at_s, until=until)


def finished(tokens: int) -> RequestFinished:
    return RequestFinished(R, 1, W, "stop", tokens)


def play(meter: PredictionMeter, *, ttft_s: float, tpot_s: float, at_s: float = 0.0, tokens: int = 11) -> None:
    made = flight(at_s=at_s)
    meter.note(made, PrefillFinished(R, 1, W, 10), at_s + ttft_s)
    meter.note(made, finished(tokens), at_s + ttft_s + tpot_s * (tokens - 1))


def test_nothing_is_known_at_first() -> None:
    assert PredictionMeter().errors(5.0).ttft == ErrorBar()


def test_a_constant_error_becomes_the_bias() -> None:
    meter = PredictionMeter()
    for _ in range(200):
        play(meter, ttft_s=2.0, tpot_s=0.05)
    errors = meter.errors(2.5)
    assert errors.ttft.bias_log == pytest.approx(math.log(2.0), rel=0.15)
    assert errors.ttft.spread_log == pytest.approx(0.0, abs=1e-6)
    assert errors.tpot.bias_log == pytest.approx(math.log(0.5), rel=0.15)


def test_errors_that_differ_widen_the_bar() -> None:
    meter = PredictionMeter()
    for number in range(200):
        play(meter, ttft_s=2.0 if number % 2 else 0.5, tpot_s=0.1)
    assert abs(meter.errors(0.0).ttft.bias_log) < 0.1
    assert meter.errors(0.0).ttft.spread_log == pytest.approx(math.log(2.0), rel=0.15)


def test_a_few_requests_are_no_proof() -> None:
    meter = PredictionMeter()
    play(meter, ttft_s=4.0, tpot_s=0.1)
    assert 0 < meter.errors(4.0).ttft.bias_log < 0.5 * math.log(4.0)


def test_an_old_error_fades_so_that_the_fleet_tries_again() -> None:
    meter = PredictionMeter()
    for _ in range(50):
        play(meter, ttft_s=3.0, tpot_s=0.3)
    now, later = meter.errors(3.0).ttft, meter.errors(1000.0).ttft
    assert now.bias_log > 0.9
    assert later.bias_log < 0.01
    assert later.requests < 1


def test_the_first_token_is_where_it_is_drawn() -> None:
    """The end of a prompt whose first token decode draws is no first token."""
    meter, made = PredictionMeter(), flight(until="prompt")
    meter.note(made, PrefillFinished(R, 1, W, 10), 0.5)
    assert meter.errors(0.5).ttft.requests == 0
    meter.note(made, DecodeBegun(R, 1, W), 1.0)
    meter.note(made, DecodeBegun(R, 1, W), 7.0)
    assert meter.errors(1.0).ttft.requests == pytest.approx(1.0)
    assert meter.errors(1.0).ttft.bias_log == pytest.approx(0.0)


def test_failures_short_answers_and_requests_without_a_prediction_teach_nothing() -> None:
    meter = PredictionMeter()
    meter.note(flight(), RequestFailed(R, 1, W, "too large"), 1.0)
    meter.note(flight(predicted=None), PrefillFinished(R, 1, W, 10), 1.0)
    play(meter, ttft_s=1.0, tpot_s=5.0, tokens=2)
    assert meter.errors(1.0).tpot == ErrorBar()
    assert meter.errors(1.0).ttft.requests == pytest.approx(1.0, rel=0.1)


def test_a_request_counts_by_how_close_its_prediction_is_to_its_slo() -> None:
    """On an idle fleet 10 ms more are twice the prediction, and decide nothing about a target of a second."""
    meter = PredictionMeter()
    for _ in range(200):
        made = flight(predicted=Prediction(0.01, 0.1))
        meter.note(made, PrefillFinished(R, 1, W, 10), 0.02)
        play(meter, ttft_s=1.0, tpot_s=0.1)
    assert abs(meter.errors(1.0).ttft.bias_log) < 0.01
    meter.note(flight(slo=None), PrefillFinished(R, 1, W, 10), 9.0)
    assert abs(meter.errors(1.0).ttft.bias_log) < 0.01


def test_the_margin_grows_with_many_misses_and_fades_in_seconds() -> None:
    """Of the requests that were predicted within their SLO, few may miss it: one in 100 for the TTFT."""

    def margin(met: int, after_s: float = 0.0) -> float:
        meter = PredictionMeter()
        for _ in range(10):
            play(meter, ttft_s=1.2, tpot_s=0.1)
            for _ in range(met):
                play(meter, ttft_s=0.9, tpot_s=0.1)
        return meter.errors(1.2 + after_s).ttft.margin_log

    assert margin(120) < 0.1 < 0.4 < margin(9) < margin(1)
    assert margin(1, after_s=30.0) < 0.1 * margin(1)


def test_one_tpot_of_ten_may_miss_its_slo() -> None:
    """A slow step delays only the requests in it, so that the TPOT may miss more often than the TTFT."""

    def margin(met: int) -> float:
        meter = PredictionMeter()
        for _ in range(10):
            play(meter, ttft_s=0.9, tpot_s=0.12)
            for _ in range(met):
                play(meter, ttft_s=0.9, tpot_s=0.09)
        return meter.errors(1.2).tpot.margin_log

    assert margin(9) < 0.1 < margin(4) < margin(1)
