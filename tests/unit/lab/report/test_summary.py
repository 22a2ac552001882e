"""Records to results: definitions, agreement with NumPy, and no NaN."""

from __future__ import annotations

import json
from array import array
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.messages import Outcome
from baton.core.types import Slo
from baton.lab.report.summary import RequestRecord, Results, SloTargets, distribution, summarize

KEYS = {
    "requests": None,
    "completed": None,
    "failed": None,
    "rejected": None,
    "duration_s": None,
    "requests_per_s": None,
    "input_tokens_per_s": None,
    "output_tokens_per_s": None,
    "ttft_s": ["mean", "p50", "p90", "p99"],
    "tpot_s": ["mean", "p50", "p90", "p99"],
    "itl_s": ["mean", "p50", "p90", "p99"],
    "e2e_s": ["mean", "p50", "p90", "p99"],
    "slo": ["ttft_s", "tpot_s", "attainment_ratio"],
    "goodput_rps": None,
    "prefix_hit_ratio": None,
    "wall_s": None,
}
BOTH = SloTargets(ttft_s=1.0, tpot_s=0.5)


def record(outcome: Outcome = "finished", arrival_s: float = 0.0, *times_s: float) -> RequestRecord:
    times_s = times_s or ((arrival_s + 0.5, arrival_s + 0.75) if outcome == "finished" else ())
    return RequestRecord(
        arrival_s=arrival_s,
        end_s=times_s[-1] if times_s else arrival_s + 0.25,
        outcome=outcome,
        input_tokens=10,
        token_times_s=times_s,
    )


def encoded(results: Results) -> dict[str, object]:
    return json.loads(msgspec.json.encode(results))


def test_the_schema_is_the_contract() -> None:
    """Keys and their order, with requests and without."""
    for results in (summarize([], slo=SloTargets(), wall_s=0.1), summarize([record()], slo=BOTH, wall_s=0.1)):
        shown = encoded(results)
        assert {key: list(value) if isinstance(value, dict) else None for key, value in shown.items()} == KEYS


def test_one_request_by_hand() -> None:
    """Three tokens at 1.5, 1.75 and 2.5 s, of a request that came at 1 s."""
    results = summarize([record("finished", 1.0, 1.5, 1.75, 2.5)], slo=BOTH, wall_s=3.0)
    assert results.ttft_s.mean == 0.5
    assert results.tpot_s.mean == 0.5
    assert (results.itl_s.p50, results.itl_s.mean) == (0.5, 0.5)
    assert results.e2e_s.p99 == 1.5
    assert results.duration_s == 1.5
    assert results.requests_per_s == pytest.approx(1 / 1.5)
    assert results.input_tokens_per_s == pytest.approx(10 / 1.5)
    assert results.output_tokens_per_s == pytest.approx(3 / 1.5)
    assert results.slo.attainment_ratio == 1.0  # targets are met at equality
    assert results.goodput_rps == pytest.approx(1 / 1.5)
    assert results.wall_s == 3.0


def test_what_was_not_answered_missed_its_slo_and_is_never_fast() -> None:
    """Failed and rejected requests are in no latency, and in the denominator of attainment."""
    failed = RequestRecord(
        arrival_s=0.0, end_s=0.1, outcome="failed", input_tokens=10, token_times_s=(0.001, 0.002), cached_tokens=10
    )
    results = summarize([record(), failed, record("rejected"), record()], slo=BOTH, wall_s=1.0)
    assert (results.requests, results.completed, results.failed, results.rejected) == (4, 2, 1, 1)
    assert results.slo.attainment_ratio == 0.5
    assert results.ttft_s.p50 == 0.5
    assert results.prefix_hit_ratio is None


def test_a_cancelled_request_neither_met_nor_missed() -> None:
    results = summarize([record(), record("cancelled")], slo=BOTH, wall_s=1.0)
    assert (results.requests, results.failed, results.rejected) == (2, 0, 0)
    assert results.slo.attainment_ratio == 1.0


def test_each_target_counts_on_its_own() -> None:
    late = record("finished", 0.0, 2.0, 2.1)
    slow = record("finished", 0.0, 0.5, 1.5)
    for slo, attained in (
        (SloTargets(ttft_s=1.0), 0.5),
        (SloTargets(tpot_s=0.5), 0.5),
        (BOTH, 0.0),
        (SloTargets(ttft_s=2.0, tpot_s=1.0), 1.0),
    ):
        assert summarize([late, slow], slo=slo, wall_s=1.0).slo.attainment_ratio == attained
    results = summarize([late, slow], slo=SloTargets(), wall_s=1.0)
    assert (results.slo.attainment_ratio, results.goodput_rps) == (None, None)


def test_one_token_has_no_tpot_and_meets_any() -> None:
    results = summarize([record("finished", 0.0, 0.5)], slo=BOTH, wall_s=1.0)
    assert (results.tpot_s.mean, results.itl_s.mean, results.slo.attainment_ratio) == (None, None, 1.0)


def test_prefix_hits_are_over_those_who_tell() -> None:
    told = msgspec_replace(record(), cached_tokens=5)
    assert summarize([told, record()], slo=SloTargets(), wall_s=1.0).prefix_hit_ratio == 0.5
    assert summarize([msgspec_replace(record(), cached_tokens=0)], slo=SloTargets(), wall_s=1.0).prefix_hit_ratio == 0.0


def msgspec_replace(old: RequestRecord, *, cached_tokens: int) -> RequestRecord:
    return RequestRecord(
        arrival_s=old.arrival_s,
        end_s=old.end_s,
        outcome=old.outcome,
        input_tokens=old.input_tokens,
        token_times_s=old.token_times_s,
        cached_tokens=cached_tokens,
    )


def test_nothing_measured_is_null() -> None:
    """Of no request, and of requests that took no time."""
    empty = encoded(summarize([], slo=BOTH, wall_s=0.0))
    assert empty["ttft_s"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert (empty["duration_s"], empty["requests_per_s"], empty["goodput_rps"]) == (None, None, None)
    instant = RequestRecord(arrival_s=1.0, end_s=1.0, outcome="rejected", input_tokens=1)
    assert encoded(summarize([instant], slo=BOTH, wall_s=0.0))["requests_per_s"] is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_quantiles_are_numpys(values: list[float]) -> None:
    found = distribution(values)
    assert found.p50 == pytest.approx(np.percentile(values, 50, method="linear"))
    assert found.p90 == pytest.approx(np.percentile(values, 90, method="linear"))
    assert found.p99 == pytest.approx(np.percentile(values, 99, method="linear"))
    assert found.mean == pytest.approx(np.mean(values))


times = st.floats(0, 1e4, allow_nan=False)


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    arrival_s = draw(times)
    gaps_s = draw(st.lists(st.floats(0, 10), max_size=8))
    token_times_s = array("d", (arrival_s + sum(gaps_s[: index + 1]) for index in range(len(gaps_s))))
    outcome: Outcome = draw(st.sampled_from(["finished", "failed", "rejected", "cancelled"])) if gaps_s else "failed"
    return RequestRecord(
        arrival_s=arrival_s,
        end_s=token_times_s[-1] if token_times_s else arrival_s,
        outcome=outcome,
        input_tokens=draw(st.integers(1, 100)),
        token_times_s=token_times_s,
        cached_tokens=draw(st.none() | st.integers(0, 1)),
    )


@given(st.lists(records(), max_size=20), st.integers(0, 1000))
def test_the_order_of_records_does_not_matter(given_records: list[RequestRecord], seed: int) -> None:
    shuffled = list(given_records)
    Random(seed).shuffle(shuffled)
    results = summarize(given_records, slo=BOTH, wall_s=1.0)
    assert summarize(shuffled, slo=BOTH, wall_s=1.0) == results
    assert b"NaN" not in msgspec.json.encode(results)
    assert results.requests >= results.completed + results.failed + results.rejected
    attained = results.slo.attainment_ratio
    assert attained is None or 0 <= attained <= 1


def test_results_survive_json() -> None:
    results = summarize([record()], slo=BOTH, wall_s=0.5)
    assert msgspec.json.decode(msgspec.json.encode(results), type=Results) == results


def test_a_request_with_targets_of_its_own_is_judged_by_them() -> None:
    """One promised 1 s for its first token, which came after 2 s; the run as a whole promised nothing."""
    times_s = [2.0, 2.1, 2.2]
    strict, loose = Slo(ttft_s=1.0, tpot_s=0.2), Slo(ttft_s=3.0, tpot_s=0.2)
    records = [
        RequestRecord(arrival_s=0.0, end_s=2.2, outcome="finished", input_tokens=4, token_times_s=times_s, slo=promised)
        for promised in (strict, loose, None)
    ]
    results = summarize(records, slo=SloTargets(), wall_s=0.0)
    assert results.slo.attainment_ratio == 2 / 3
    assert results.goodput_rps == 2 / 2.2
    assert summarize(records[2:], slo=SloTargets(), wall_s=0.0).slo.attainment_ratio is None
