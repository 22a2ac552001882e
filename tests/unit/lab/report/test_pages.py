"""Pages are whole, self-contained, and show the figures that they were given."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.core.types import Slo, WorkerId
from baton.lab.report import bins
from baton.lab.report.run_page import RunPage, log_record, render_log, render_run
from baton.lab.report.summary import RequestRecord, SloTargets, summarize
from baton.lab.report.timeline import RequestLine, Timeline, read_timeline
from tests.unit.lab.report.logs import log_of, request

DATA = re.compile(r'<script type="application/json">(.*?)</script>', re.DOTALL)


class Tags(HTMLParser):
    """Every tag that opens closes in its place, but for those that never do."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag not in ("meta", "!doctype"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(page: str) -> list[dict[str, Any]]:
    """The page is well formed and loads nothing. Returns the data of its plots."""
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert not tags.seen & {"link", "img", "iframe", "object"}
    assert "<script src" not in page
    assert "default-src 'none'" in page
    return [json.loads(data) for data in DATA.findall(page)]


def records(count: int = 200) -> list[RequestRecord]:
    draw = Random(1)
    made: list[RequestRecord] = []
    for index in range(count):
        arrival_s = index * 0.1
        first_s = arrival_s + draw.uniform(0.05, 0.5)
        times_s = [first_s + 0.02 * token for token in range(1 + index % 9)]
        made.append(
            RequestRecord(
                arrival_s=arrival_s, end_s=times_s[-1], outcome="finished", input_tokens=9, token_times_s=times_s
            )
        )
    made.append(RequestRecord(arrival_s=3.0, end_s=3.0, outcome="rejected", input_tokens=9))
    made.append(RequestRecord(arrival_s=4.0, end_s=5.0, outcome="failed", input_tokens=9, token_times_s=[4.5]))
    return made


def run_page(found: list[RequestRecord], slo: SloTargets, timeline: Timeline | None = None) -> str:
    return render_run(
        RunPage(
            title="a <b> run",
            subtitle="x & y",
            facts=[("policy", "<baton>")],
            remarks=["a & b"],
            results=summarize(found, slo=slo, wall_s=0.0),
            records=found,
            slo=slo,
            timeline=timeline,
        )
    )


def test_a_run_is_a_page() -> None:
    """Names are escaped, the share that met the target is on it, and every plot is there."""
    slo = SloTargets(ttft_s=0.25, tpot_s=0.1)
    found = records()
    page = run_page(found, slo, read_timeline(log_of()))
    kinds = Counter(plot["type"] for plot in check(page))
    assert kinds == {"curves": 12, "heat": 2, "workers": 1, "requests": 1}
    met = np.mean([record.ttft_s <= 0.25 for record in found if record.outcome == "finished" and record.ttft_s])
    assert f"SLO 250 ms: met by {met:.1%}" in page
    assert "&lt;baton&gt;" in page
    assert "<baton>" not in page
    for title in ("Every request", "Workers over time", "Running requests per worker", "SLO attainment"):
        assert title in page


@pytest.mark.parametrize("slo", [SloTargets(), SloTargets(ttft_s=1.0)])
@pytest.mark.parametrize("count", [0, 1])
def test_a_run_of_nothing_is_a_page(count: int, slo: SloTargets) -> None:
    check(run_page(records()[:count], slo))
    check(run_page(records()[-2:], slo))
    check(run_page([], slo, Timeline()))


def test_classes_of_requests_show_an_attainment() -> None:
    """The run promised nothing, its requests did."""
    promised = [
        RequestRecord(
            arrival_s=record.arrival_s,
            end_s=record.end_s,
            outcome=record.outcome,
            input_tokens=1,
            token_times_s=record.token_times_s,
            slo=Slo(ttft_s=0.2, tpot_s=1.0),
        )
        for record in records()
    ]
    assert "SLO attainment, by time of arrival" in run_page(promised, SloTargets())
    assert "SLO attainment" not in run_page(records(), SloTargets())


def test_tenants_have_rows_of_their_own() -> None:
    """The busiest first; a run of one tenant has no such table."""
    two = [replace(record, tenant="big" if index % 3 else "small") for index, record in enumerate(records())]
    page = run_page(two, SloTargets(ttft_s=0.25))
    check(page)
    assert 0 < page.index("<td>big</td>") < page.index("<td>small</td>")
    assert "<h2>Tenants</h2>" not in run_page(records(), SloTargets())


def test_a_long_run_shows_a_part_of_its_requests_and_says_so() -> None:
    assert "one of every 3 requests" in run_page(records(2500), SloTargets())


def test_a_log_is_a_page() -> None:
    page = render_log(read_timeline(log_of()), "my.log")
    check(page)
    assert "Workers over time" in page
    assert ">3</b><span>requests" in page
    assert ">2</b><span>moved to another worker" in page


steps = st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50)), max_size=12)


@given(steps, st.integers(1, 9))
def test_bins_hold_the_area_of_a_step_function(changes: list[tuple[float, int]], count: int) -> None:
    """Against adding it up piece by piece; the whole area is conserved."""
    changes.sort(key=lambda change: change[0])
    times_s, values = [at for at, _ in changes], [value for _, value in changes]
    borders = bins.edges(0.0, 100.0, count)
    means = bins.step_means(times_s, values, borders)
    ends = [*times_s[1:], 100.0]
    for index, mean in enumerate(means):
        low, high = borders[index], borders[index + 1]
        area = sum(
            value * max(0.0, min(high, end) - max(low, begin))
            for begin, end, value in zip(times_s, ends, values, strict=False)
        )
        assert mean == pytest.approx(area / (high - low), abs=1e-6)


def test_open_spans_are_counted_while_they_are_open() -> None:
    borders = bins.edges(0.0, 4.0, 4)
    assert bins.open_counts([0.0, 1.0, 1.5], [2.0, 3.0, 1.5], borders).tolist() == [1.0, 2.0, 1.0, 0.0]


def test_quantiles_are_of_the_values_in_their_bin() -> None:
    times_s, values = np.array([0.5, 3.5, 0.6, 4.0]), np.array([1.0, 7.0, 3.0, 9.0])
    found = bins.quantiles(times_s, values, bins.edges(0.0, 4.0, 4), (0.0, 0.5))
    assert found.tolist()[0] == pytest.approx([1.0, np.nan, np.nan, 7.0], nan_ok=True)
    assert found.tolist()[1] == pytest.approx([2.0, np.nan, np.nan, 8.0], nan_ok=True)


def test_plots_over_time_add_up_to_the_run() -> None:
    """The rates of a page, times the widths of their bins, are the tokens and requests of the run."""
    found = records()
    data = check(run_page(found, SloTargets(ttft_s=0.25)))
    rates = {one["label"]: (one["x"], one["values"]) for plot in data for one in plot.get("series", ())}

    def total(label: str) -> float:
        x, values = rates[label]
        return sum(values) * (x[1] - x[0])

    finished = [record for record in found if record.outcome == "finished"]
    in_slo = sum(record.ttft_s is not None and record.ttft_s <= 0.25 for record in finished)
    for label, expected in {
        "output": sum(record.output_tokens for record in found),
        "prompt": sum(record.input_tokens for record in found if record.token_times_s),
        "finished": len(finished),
        "in SLO": in_slo,
        "refused": 1,
        "failed": 1,
        "arrivals": len(found),
    }.items():
        assert total(label) == pytest.approx(expected, rel=1e-4), label


def test_lanes_show_the_roles_of_the_log() -> None:
    timeline = read_timeline(log_of())
    [lanes] = [plot for plot in check(render_log(timeline, "x")) if plot["type"] == "workers"]
    assert {row["name"] for row in lanes["workers"]} == set(timeline.workers)
    for row in lanes["workers"]:
        line = timeline.workers[WorkerId(row["name"])]
        assert [role for _, _, role, _ in row["roles"]] == [span.role for span in line.roles]
        assert len(row["busy"]) == len(lanes["borders"]) - 1


def test_a_request_that_was_cancelled_while_decoding_has_its_first_token() -> None:
    """Otherwise a page shows it in prefill until its end."""
    line = RequestLine(request("left"), 10.0, first_token_s=11.0, closed_s=15.0, outcome="cancelled")
    assert log_record(line, 20.0).token_times_s == [11.0]
    before = RequestLine(request("early"), 10.0, closed_s=15.0, outcome="cancelled")
    assert log_record(before, 20.0).token_times_s == []
