"""Arrivals, lengths, and what is done to a trace before it is played."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, pstdev

import pytest

from baton.workload.arrivals import AllAtOnce, Arrivals, ConstantArrivals, GammaArrivals, PoissonArrivals
from baton.workload.lengths import FixedLengths, UniformLengths, synthetic_trace
from baton.workload.load import read_trace
from baton.workload.request import Trace, TraceRequest
from baton.workload.schedule import fit_context, scale_rate, with_arrivals

TRACES = Path(__file__).parents[2] / "data" / "traces"


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        (PoissonArrivals(8.0), 1.0),
        (GammaArrivals(8.0, 3.0), 3.0),
        (GammaArrivals(8.0, 0.5), 0.5),
        (ConstantArrivals(8.0), 0.0),
    ],
)
def test_arrivals_have_their_rate_and_variation(arrivals: Arrivals, cv: float) -> None:
    """Over 40,000 gaps: mean 1/8 s, and the coefficient of variation asked for."""
    times_s = arrivals.times_s(40_001, Random(3))
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    assert times_s[0] == 0.0
    assert times_s == sorted(times_s)
    assert fmean(gaps_s) == pytest.approx(1 / 8, rel=0.06)
    assert pstdev(gaps_s) / fmean(gaps_s) == pytest.approx(cv, rel=0.06, abs=1e-9)


@pytest.mark.parametrize(
    "arrivals", [PoissonArrivals(8.0), GammaArrivals(8.0, 3.0), ConstantArrivals(8.0), AllAtOnce()]
)
def test_the_same_seed_gives_the_same_times(arrivals: Arrivals) -> None:
    assert arrivals.times_s(50, Random(1)) == arrivals.times_s(50, Random(1))
    assert [len(arrivals.times_s(count, Random(1))) for count in (0, 1, 2)] == [0, 1, 2]


def test_synthetic_requests_have_the_lengths_asked_for() -> None:
    trace = synthetic_trace(200, UniformLengths((3, 5), (7, 7)), PoissonArrivals(1.0), Random(0))
    assert {request.input_tokens for request in trace.requests} == {3, 4, 5}
    assert {request.output_tokens for request in trace.requests} == {7}
    fixed = synthetic_trace(2, FixedLengths(9, 1), AllAtOnce(), Random(0))
    assert fixed.requests == (TraceRequest(at_s=0.0, input_tokens=9, output_tokens=1),) * 2


def test_a_rate_scale_of_two_halves_all_times() -> None:
    trace = read_trace(TRACES / "burstgpt.csv")
    assert [request.at_s for request in scale_rate(trace, 2.0).requests] == [0.0, 20.0, 56.5]


def test_new_times_keep_order_and_lengths() -> None:
    trace = read_trace(TRACES / "vidur.csv")
    paced = with_arrivals(trace, ConstantArrivals(4.0), Random(0))
    assert paced.timing == "absolute"
    assert [request.at_s for request in paced.requests] == [index / 4 for index in range(8)]
    assert [request.input_tokens for request in paced.requests] == [request.input_tokens for request in trace.requests]


def test_sessions_start_apart_and_keep_their_pace() -> None:
    """Calls of a session keep their distances; requests of all sessions come in order of time."""
    trace = read_trace(TRACES / "agent.jsonl")
    paced = with_arrivals(trace, ConstantArrivals(0.5), Random(0))
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
