"""Arrivals, lengths, and what is done to a trace before it is played."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, pstdev

import pytest

from baton.lab.workload.arrivals import (
    AllAtOnce,
    Arrivals,
    BurstyArrivals,
    ConstantArrivals,
    DiurnalArrivals,
    GammaArrivals,
    PoissonArrivals,
    WeibullArrivals,
    draw_times_s,
    fill_span,
    follow_rate,
    weibull_shape,
)
from baton.lab.workload.conversation import link_conversations
from baton.lab.workload.describe import Conversation, Workload
from baton.lab.workload.generate import generate, synthetic_trace
from baton.lab.workload.load import read_trace
from baton.lab.workload.request import Trace, TraceRequest
from baton.lab.workload.schedule import cut_trace, fit_context, redraw_arrivals, scale_rate, spread_arrivals

TRACES = Path(__file__).parents[3] / "data" / "traces"


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        (PoissonArrivals(8.0), 1.0),
        (GammaArrivals(8.0, 3.0), 3.0),
        (GammaArrivals(8.0, 0.5), 0.5),
        (WeibullArrivals(8.0, 2.0), 2.0),
        (WeibullArrivals(8.0, 0.5), 0.5),
        (ConstantArrivals(8.0), 0.0),
    ],
)
def test_arrivals_have_their_rate_and_variation(arrivals: Arrivals, cv: float) -> None:
    """Over 40,000 gaps: mean 1/8 s, and the coefficient of variation asked for."""
    times_s = draw_times_s(arrivals, 40_001, Random(3))
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    assert times_s[0] == 0.0
    assert times_s == sorted(times_s)
    assert fmean(gaps_s) == pytest.approx(1 / 8, rel=0.06)
    assert pstdev(gaps_s) / fmean(gaps_s) == pytest.approx(cv, rel=0.06, abs=1e-9)


@pytest.mark.parametrize(
    "arrivals",
    [
        PoissonArrivals(8.0),
        GammaArrivals(8.0, 3.0),
        WeibullArrivals(8.0, 3.0),
        ConstantArrivals(8.0),
        AllAtOnce(),
        BurstyArrivals(8.0),
        DiurnalArrivals(8.0),
    ],
)
def test_the_same_seed_gives_the_same_times(arrivals: Arrivals) -> None:
    times_s = draw_times_s(arrivals, 50, Random(1))
    assert draw_times_s(arrivals, 50, Random(1)) == times_s == sorted(times_s)
    assert [len(draw_times_s(arrivals, count, Random(1))) for count in (0, 1, 2)] == [0, 1, 2]


def test_a_weibull_of_cv_one_is_exponential() -> None:
    assert weibull_shape(1.0) == pytest.approx(1.0, rel=1e-6)


def test_a_day_has_its_peak_in_the_middle() -> None:
    """Mean 8/s, at the peak three times the rate of the night, over 20 days of 1,000 s."""
    day = DiurnalArrivals(8.0, peak_ratio=3.0, period_s=1000.0)
    times_s = [at_s for at_s in draw_times_s(day, 200_000, Random(5)) if at_s < 20_000]
    assert len(times_s) / 20_000 == pytest.approx(8.0, rel=0.02)
    night = sum(at_s % 1000 < 50 or at_s % 1000 >= 950 for at_s in times_s)
    noon = sum(450 <= at_s % 1000 < 550 for at_s in times_s)
    assert noon / night == pytest.approx(3.0, rel=0.05)
    late = DiurnalArrivals(8.0, peak_ratio=3.0, period_s=1000.0, start_s=500.0)
    assert sum(at_s < 50 for at_s in draw_times_s(late, 2000, Random(5))) > 1.5 * sum(at_s < 50 for at_s in times_s)


def test_a_period_far_below_the_gaps_keeps_its_shape() -> None:
    """A request in ten periods still comes at noon three times as often as at night."""
    short = DiurnalArrivals(0.1, peak_ratio=3.0, period_s=1.0)
    times_s = draw_times_s(short, 60_000, Random(5))
    assert 60_000 / times_s[-1] == pytest.approx(0.1, rel=0.02)
    night = sum(at_s % 1 < 0.1 or at_s % 1 >= 0.9 for at_s in times_s)
    noon = sum(0.4 <= at_s % 1 < 0.6 for at_s in times_s)
    assert noon / night == pytest.approx(2.8, rel=0.05)


def test_periods_in_which_nobody_comes_are_not_gone_through() -> None:
    """There are 10 ** 9 of them from one arrival to the next: whoever goes through them does not come to an end."""
    times_s = draw_times_s(DiurnalArrivals(1e-6, period_s=0.001), 2_000, Random(5))
    assert times_s == sorted(times_s)
    assert 2_000 / times_s[-1] == pytest.approx(1e-6, rel=0.1)


def test_storms_are_denser_than_calms_and_the_mean_holds() -> None:
    """Storms of 10 s at ten times the rate: counts of 10 s vary far more than Poisson's, whose variance is its mean."""
    times_s = draw_times_s(BurstyArrivals(4.0, burst_ratio=10.0, burst_s=10.0, calm_s=40.0), 40_000, Random(2))
    assert 40_000 / times_s[-1] == pytest.approx(4.0, rel=0.08)
    counts = [0] * (int(times_s[-1] // 10) + 1)
    for at_s in times_s:
        counts[int(at_s // 10)] += 1
    assert pstdev(counts) ** 2 > 10 * fmean(counts)


def test_synthetic_requests_have_the_lengths_asked_for() -> None:
    trace = synthetic_trace(200, (4, 7), PoissonArrivals(1.0), Random(0))
    assert {(request.input_tokens, request.output_tokens) for request in trace.requests} == {(4, 7)}
    fixed = synthetic_trace(2, (9, 1), AllAtOnce(), Random(0))
    assert fixed.requests == (TraceRequest(at_s=0.0, input_tokens=9, output_tokens=1),) * 2


def test_a_rate_scale_of_two_halves_all_times() -> None:
    trace = read_trace(TRACES / "burstgpt.csv")
    assert [request.at_s for request in scale_rate(trace, 2.0).requests] == [0.0, 20.0, 56.5]


def test_new_times_keep_order_and_lengths() -> None:
    trace = read_trace(TRACES / "vidur.csv")
    paced = redraw_arrivals(trace, ConstantArrivals(4.0), Random(0))
    assert paced.timing == "absolute"
    assert [request.at_s for request in paced.requests] == [index / 4 for index in range(8)]
    assert [request.input_tokens for request in paced.requests] == [request.input_tokens for request in trace.requests]


def test_sessions_start_apart_and_keep_their_pace() -> None:
    """Calls of a session keep their distances; requests of all sessions come in order of time."""
    trace = read_trace(TRACES / "agent.jsonl")
    paced = redraw_arrivals(trace, ConstantArrivals(0.5), Random(0))
    assert [request.at_s for request in paced.requests] == sorted(request.at_s for request in paced.requests)
    second = [request.at_s for request in paced.requests if request.session == "1"]
    assert second == pytest.approx([2.0 + request.at_s for request in trace.requests if request.session == "1"])


def test_a_long_request_is_cut_to_the_context_and_keeps_its_prefix() -> None:
    """Output up to half of the context stays; of the input stays the front."""
    fits = TraceRequest(at_s=0.0, input_tokens=60, output_tokens=40)
    long = TraceRequest(
        at_s=0.0, input_tokens=160, output_tokens=30, prefix_ids=tuple(range(10)), prefix_block_tokens=16
    )
    wordy = TraceRequest(at_s=0.0, input_tokens=10, output_tokens=500)
    trace, shortened = fit_context(Trace(format="x", timing="absolute", requests=(fits, long, wordy)), 100)
    assert shortened == 2
    assert trace.requests[0] is fits
    assert (trace.requests[1].input_tokens, trace.requests[1].output_tokens) == (70, 30)
    assert trace.requests[1].prefix_ids == (0, 1, 2, 3, 4)
    assert (trace.requests[2].input_tokens, trace.requests[2].output_tokens) == (10, 50)


def test_a_conversation_ends_within_the_context() -> None:
    """Before, each turn was shortened alone, and the conversation that it repeats was sent in full."""
    turns = Conversation(turns=8, think_s=1.0, followup_tokens=400)
    workload = Workload(requests=200, input_tokens=1500, output_tokens=300, conversation=turns)
    drawn = generate(workload, seed=1)
    kept, shortened = fit_context(drawn, 4096)
    assert shortened == 0
    assert 0 < len(kept.requests) < len(drawn.requests)
    linked, longest = link_conversations(kept.requests), 0
    for index, opener in linked.openers:
        tokens = opener.input_tokens + opener.output_tokens
        for turn in linked.take_rest(index):
            tokens = turn.prompt_tokens(tokens) + turn.request.output_tokens
        longest = max(longest, tokens)
    assert 4096 - 700 < longest <= 4096
    assert fit_context(kept, 4096)[0] == kept
    opener, *rest = fit_context(drawn, 1024)[0].requests
    assert (opener.input_tokens, opener.output_tokens) == (724, 300)
    assert not any(request.turn for request in rest), "the next turns repeat more than fits"


def test_nobody_comes_while_the_rate_is_zero() -> None:
    """Gaps of no length neither: the first comes when the rate rises."""
    assert list(follow_rate(iter([0.0, 1.0, 5.0]), [(1.0, 0.0), (2.0, 1.0)])) == [1.0, 2.0]


def test_gaps_fill_a_span_and_a_burst_is_one_instant() -> None:
    assert fill_span(iter([1.0, 3.0]), 2, 8.0) == [0.0, 2.0]
    assert fill_span(iter([0.0, 0.0, 0.0]), 3, 8.0) == [0.0, 0.0, 0.0]


def at(*times_s: float) -> Trace:
    requests = tuple(TraceRequest(at_s=at_s, input_tokens=1, output_tokens=1) for at_s in times_s)
    return Trace(format="x", timing="absolute", requests=requests)


def test_a_slice_begins_at_zero() -> None:
    """From 10 s on, 20 s long, without the first: what is at its end belongs to the next slice."""
    part = cut_trace(at(0, 10, 11, 29, 30), start_s=10, duration_s=20, skip=1)
    assert [request.at_s for request in part.requests] == [0, 18]
    assert not cut_trace(at(0, 1), start_s=5, duration_s=None, skip=0).requests


def test_requests_of_one_instant_are_spread_until_the_next() -> None:
    """Three at 0, two at 3, one at 4, spread over 3 s: the two have one second only."""
    times_s = [request.at_s for request in spread_arrivals(at(0, 0, 0, 3, 3, 4), 3.0).requests]
    assert times_s == [0, 1, 2, 3, 3.5, 4]


def test_closed_loops_start_apart_and_think_as_long_as_before() -> None:
    """New arrivals are those of conversations; the earliest time of a later turn moves with its opening."""
    turn = {"input_tokens": 1, "output_tokens": 1}
    requests = (
        TraceRequest(at_s=5.0, session="a", **turn),
        TraceRequest(at_s=6.0, **turn),
        TraceRequest(at_s=7.5, session="a", turn=1, think_s=2.5, **turn),
    )
    paced = redraw_arrivals(Trace(format="x", timing="absolute", requests=requests), ConstantArrivals(0.1), Random(0))
    assert [(request.at_s, request.session) for request in paced.requests] == [(0.0, "a"), (2.5, "a"), (10.0, "")]
    assert [request.think_s for request in scale_rate(paced, 2.0).requests] == [None, 1.25, None]
