"""New times for a trace: the words of `--arrivals`, and the rate that the requests then have."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from statistics import fmean, pstdev

import pytest

from baton.core.errors import ConfigError
from baton.lab.workload.arrivals import (
    AllAtOnce,
    Arrivals,
    BurstyArrivals,
    ConstantArrivals,
    DiurnalArrivals,
    GammaArrivals,
    PoissonArrivals,
    WeibullArrivals,
)
from baton.lab.workload.request import Timing, Trace, TraceRequest
from baton.lab.workload.retime import KINDS, describe_arrivals, rate_problems, read_arrivals, retime


def trace(*times_s: float, timing: Timing = "absolute") -> Trace:
    requests = tuple(
        TraceRequest(at_s=at_s, input_tokens=1 + index, output_tokens=1) for index, at_s in enumerate(times_s)
    )
    return Trace(format="x", timing=timing, requests=requests)


@pytest.mark.parametrize(
    ("words", "arrivals"),
    [
        ("poisson", PoissonArrivals(1.0)),
        ("gamma,cv=3", GammaArrivals(1.0, 3.0)),
        ("weibull, cv=0.5", WeibullArrivals(1.0, 0.5)),
        ("constant", ConstantArrivals(1.0)),
        ("bursty,burst_ratio=10,calm_s=20", BurstyArrivals(1.0, burst_ratio=10.0, calm_s=20.0)),
        ("diurnal,period_s=3600,start_s=0", DiurnalArrivals(1.0, period_s=3600.0)),
        ("at-once", AllAtOnce()),
    ],
)
def test_every_process_has_words(words: str, arrivals: Arrivals) -> None:
    assert read_arrivals(words) == arrivals
    assert words.split(",")[0] in KINDS


def test_no_process_is_without_a_word() -> None:
    assert set(KINDS) == {"poisson", "gamma", "weibull", "constant", "bursty", "diurnal", "at-once"}
    assert describe_arrivals(read_arrivals("gamma,cv=3")) == "gamma, cv 3"
    assert describe_arrivals(AllAtOnce()) == "at-once"


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        ("posson", ["there are no arrivals 'posson' (did you mean 'poisson'?); known are poisson, "]),
        ("", ["there are no arrivals ''; known are "]),
        ("gamma", ["gamma arrivals need cv: write gamma,cv=NUMBER"]),
        ("gamma,cv", ["cv: '' is not a number; write cv=NUMBER"]),
        ("gamma,cv=0", ["gamma.cv is 0, but must be between 0.001 and 1000"]),
        ("gamma,cv=nan", ["gamma.cv is nan, but must be between 0.001 and 1000"]),
        ("gamma,cv=1,cv=2", ["cv=2: cv is given twice"]),
        ("poisson,rate_rps=3", ["rate_rps=3: give the rate with --rate"]),
        ("poisson,cv=3", ["cv=3: there is no key 'cv'; it takes no keys"]),
        (
            "bursty,burst=4,calm_s=x",
            [
                "burst=4: there is no key 'burst' (did you mean 'burst_s'?); it takes burst_ratio, burst_s, calm_s",
                "calm_s=x: 'x' is not a number; write calm_s=NUMBER",
            ],
        ),
    ],
)
def test_words_that_say_nothing_are_refused_with_what_to_write(words: str, problems: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_arrivals(words)
    said = str(caught.value).splitlines()
    assert len(said) == len(problems)
    assert all(line.startswith(problem) for line, problem in zip(said, problems, strict=True))


def test_who_comes_at_once_has_no_rate() -> None:
    assert rate_problems(AllAtOnce(), rated=False) == []
    assert rate_problems(PoissonArrivals(1.0), rated=True) == []
    assert len(rate_problems(AllAtOnce(), rated=True)) == 1


def test_a_rate_that_is_not_given_is_that_of_the_trace() -> None:
    """Five requests over 8 s are 1 in 2 s."""
    uneven = trace(0, 1, 1, 1, 8)
    paced = retime(uneven, ConstantArrivals(1.0), rate_rps=None, draw=Random(0))
    assert [request.at_s for request in paced.requests] == [0, 2, 4, 6, 8]
    assert [request.input_tokens for request in paced.requests] == [1, 2, 3, 4, 5]
    asked = retime(uneven, ConstantArrivals(1.0), rate_rps=4.0, draw=Random(0))
    assert [request.at_s for request in asked.requests] == [0, 0.25, 0.5, 0.75, 1]


@pytest.mark.parametrize("timing", ["absolute", "none"])
def test_new_times_have_the_rate_and_the_variation_whatever_the_trace_has(timing: Timing) -> None:
    paced = retime(trace(*[0.0] * 20_001, timing=timing), GammaArrivals(1.0, 3.0), rate_rps=5.0, draw=Random(2))
    gaps_s = [later.at_s - earlier.at_s for earlier, later in pairwise(paced.requests)]
    assert fmean(gaps_s) == pytest.approx(1 / 5, rel=0.08)
    assert pstdev(gaps_s) / fmean(gaps_s) == pytest.approx(3.0, rel=0.1)


def test_sessions_start_so_often_that_their_requests_have_the_rate() -> None:
    """Two calls a session: sessions start half as often as requests come."""
    calls = tuple(
        TraceRequest(at_s=float(turn), input_tokens=1, output_tokens=1, session=f"s{number}", turn=turn)
        for number in range(50)
        for turn in range(2)
    )
    paced = retime(
        Trace(format="x", timing="session", requests=calls), ConstantArrivals(1.0), rate_rps=4.0, draw=Random(0)
    )
    assert sorted(request.at_s for request in paced.requests if not request.turn) == [place / 2 for place in range(50)]


@pytest.mark.parametrize(
    ("without", "words"),
    [
        (trace(0, 0, timing="none"), "the trace has no times, so there is no rate to keep; give --rate R"),
        (trace(0, 1, timing="session"), "the trace counts time from the start of each session"),
        (trace(0, 0), "all requests of the trace arrive at once"),
    ],
)
def test_a_trace_without_a_rate_needs_one(without: Trace, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        retime(without, PoissonArrivals(1.0), rate_rps=None, draw=Random(0))
    at_once = retime(without, AllAtOnce(), rate_rps=None, draw=Random(0))
    assert [request.at_s for request in at_once.requests[:1]] == [0.0]
