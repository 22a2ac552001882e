"""Pages are whole, self-contained, and show the figures that they were given."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from random import Random
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.core.types import Slo
from baton.lab.report import bins, svg
from baton.lab.report.run_page import RunPage, log_record, render_log, render_run
from baton.lab.report.summary import RequestRecord, SloTargets, summarize
from baton.lab.report.timeline import RequestLine, Timeline, read_timeline
from tests.unit.lab.report.logs import log_of, request

SVG = re.compile(r"<svg.*?</svg>", re.DOTALL)


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


def check(page: str) -> set[str]:
    """The page is well formed and needs nothing from elsewhere. Returns its tags."""
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert not tags.seen & {"script", "link", "img", "iframe", "object"}
    assert "http" not in page
    for drawing in SVG.findall(page):
        ElementTree.fromstring(drawing)
        assert "nan" not in drawing
        assert "inf" not in drawing.replace("information", "")
    return tags.seen


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
    check(page)
    assert len(SVG.findall(page)) == 13
    met = np.mean([record.ttft_s <= 0.25 for record in found if record.outcome == "finished" and record.ttft_s])
    assert f"SLO 250 ms: met by {met:.1%}" in page
    assert "&lt;baton&gt;" in page
    assert "<baton>" not in page
    for title in ("Every request", "Roles and queues", "Running requests per worker", "SLO attainment"):
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
    assert "Roles and queues" in page
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


@given(st.floats(0, 1e9), st.floats(1e-9, 1e9), st.integers(1, 10))
def test_ticks_are_round_and_inside(low: float, width: float, wanted: int) -> None:
    high = low + width
    found = svg.ticks(low, high, wanted)
    assert len(found) <= 2 * wanted + 2
    assert all(low - 1e-6 * high <= value <= high * (1 + 1e-6) for value in found)
    assert found == sorted(found)


def test_numbers_on_axes_are_short() -> None:
    assert [svg.short(value) for value in (0, 0.25, 1500, 120_000, 3.2e6, 5e9)] == [
        "0", "0.25", "1500", "120k", "3.2M", "5G",
    ]  # fmt: skip


def test_a_request_that_was_cancelled_while_decoding_has_its_first_token() -> None:
    """Otherwise a page shows it in prefill until its end."""
    line = RequestLine(request("left"), 10.0, first_token_s=11.0, closed_s=15.0, outcome="cancelled")
    assert log_record(line, 20.0).token_times_s == [11.0]
    before = RequestLine(request("early"), 10.0, closed_s=15.0, outcome="cancelled")
    assert log_record(before, 20.0).token_times_s == []
