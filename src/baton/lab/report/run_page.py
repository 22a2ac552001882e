"""Render a run or a decision log as an HTML page, for `--html` of `baton bench`, `baton sim` and `baton replay`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton.lab.report.fleet_plots import fleet_plots
from baton.lab.report.page import notes, page, plots, section, short_number, table, tiles
from baton.lab.report.run_plots import e2e_plot, latency_plots, lives_plot, load_plots, time_plots, ttft_plot
from baton.lab.report.summary import Distribution, RequestRecord, Results, SloTargets, summarize
from baton.lab.report.timeline import RequestLine, Timeline

ROWS_MAX = 50
"""Bound on the rows of the tables of tenants and of cells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """Input of a run's page."""

    title: str
    subtitle: str
    facts: Sequence[tuple[str, str]]
    """Settings of the run: names and values as text."""
    remarks: Sequence[str] = ()
    """Remarks that limit the validity of the figures."""
    results: Results
    records: Sequence[RequestRecord]
    slo: SloTargets
    timeline: Timeline | None = None
    """Timeline of the workers. None: unknown."""
    cells: Sequence[Sequence[RequestRecord]] = ()
    """Records of each cell, if the fleet has several."""


def render_run(run: RunPage) -> str:
    """Return the HTML page of a run."""
    records, timeline = run.records, run.timeline
    span_s = _span_s(records, timeline)
    return page(
        run.title,
        run.subtitle,
        (
            tiles(_headline(run.results)),
            section("Latency", _latencies(run.results) + plots(latency_plots(records, run.slo))),
            section("Over time", plots([*time_plots(records, run.slo, *span_s), lives_plot(records, *span_s)])),
            section("Workers", plots(fleet_plots(timeline, *span_s)) if timeline is not None else ""),
            section("Cells", _cells(run.cells, run.slo)),
            section("Tenants", _tenants(run.records, run.slo)),
            section("Run", table((), [list(fact) for fact in run.facts]) + notes(run.remarks)),
        ),
    )


def _span_s(records: Sequence[RequestRecord], timeline: Timeline | None) -> tuple[float, float]:
    """Return the ends of the page's time axis: of the requests, and of the log if there is one."""
    starts_s, ends_s = [record.arrival_s for record in records], [record.end_s for record in records]
    if timeline is not None and timeline.start_s is not None:
        starts_s, ends_s = [*starts_s, timeline.start_s], [*ends_s, timeline.end_s]
    return min(starts_s, default=0.0), max(ends_s, default=0.0)


def _headline(results: Results) -> list[tuple[str, str]]:
    facts = [
        ("requests completed", f"{results.completed:,} of {results.requests:,}"),
        ("rejected", f"{results.rejected:,}"),
        ("failed", f"{results.failed:,}"),
        ("requests per second", short_number(results.requests_per_s)),
        ("output tokens per second", short_number(results.output_tokens_per_s)),
        ("TTFT p50", _seconds(results.ttft_s.p50)),
        ("TPOT p50", _seconds(results.tpot_s.p50)),
    ]
    if results.slo.attainment_ratio is not None:
        facts.append(("SLO attainment", f"{results.slo.attainment_ratio:.1%}"))
        facts.append(("goodput, requests/s", short_number(results.goodput_rps)))
    if results.prefix_hit_ratio is not None:
        facts.append(("prefix hit", f"{results.prefix_hit_ratio:.1%}"))
    return facts


def _latencies(results: Results) -> str:
    rows = (("TTFT", results.ttft_s), ("TPOT", results.tpot_s), ("ITL", results.itl_s), ("E2E", results.e2e_s))
    return table(("ms", "mean", "p50", "p90", "p99"), [(name, *milliseconds(seconds)) for name, seconds in rows])


def _cells(cells: Sequence[Sequence[RequestRecord]], slo: SloTargets) -> str:
    """Return a table with a row per cell. The names of a cell's workers contain its number."""
    return _parts("cell", [(f"c{number}", records) for number, records in enumerate(cells)], slo) if cells else ""


def _tenants(records: Sequence[RequestRecord], slo: SloTargets) -> str:
    """Return a table with a row per tenant, the busiest first. Empty if there is only one tenant."""
    by_tenant: dict[str, list[RequestRecord]] = {}
    for record in records:
        by_tenant.setdefault(record.tenant, []).append(record)
    if len(by_tenant) < 2:
        return ""
    return _parts("tenant", sorted(by_tenant.items(), key=lambda item: (-len(item[1]), item[0])), slo)


def _parts(kind: str, parts: Sequence[tuple[str, Sequence[RequestRecord]]], slo: SloTargets) -> str:
    """Return a table with a row per group of records, at most `ROWS_MAX`."""
    head = (
        kind,
        "requests",
        "completed",
        "input tokens",
        "output tokens",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "SLO",
    )
    left = f"<p>and {len(parts) - ROWS_MAX} others</p>" if len(parts) > ROWS_MAX else ""
    return table(head, [_row(name, own, slo) for name, own in parts[:ROWS_MAX]]) + left


def _row(name: str, records: Sequence[RequestRecord], slo: SloTargets) -> list[str]:
    results = summarize(records, slo=slo, wall_s=0.0)
    done = [record for record in records if record.outcome == "finished"]
    attained = results.slo.attainment_ratio
    return [
        name or "-",
        f"{results.requests:,}",
        f"{results.completed:,}",
        f"{sum(record.input_tokens for record in done):,}",
        f"{sum(record.output_tokens for record in done):,}",
        *(_seconds(value) for value in (results.ttft_s.p50, results.ttft_s.p99, results.tpot_s.p50)),
        "-" if attained is None else f"{attained:.1%}",
    ]


def milliseconds(seconds: Distribution) -> list[str]:
    values = (seconds.mean, seconds.p50, seconds.p90, seconds.p99)
    return ["-" if value is None else f"{value * 1000:,.2f}" for value in values]


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:,.3g} ms" if value < 1 else f"{value:,.3g} s"


def render_log(timeline: Timeline, name: str) -> str:
    """Return the HTML page of a decision log. It lacks ITL and TPOT: the log has only the first token's time."""
    lines = list(timeline.requests.values())
    records = [log_record(line, timeline.end_s) for line in lines]
    known = [log_record(line, timeline.end_s) for line in lines if line.first_token_s is not None]
    span_s = _span_s(records, timeline)
    return page(
        f"decision log: {name}",
        "times as the coordinator saw them",
        (
            tiles(_facts(timeline)),
            section("Latency", plots([ttft_plot(known, SloTargets()), e2e_plot(records)])),
            section("Over time", plots([*load_plots(records, *span_s), lives_plot(records, *span_s)])),
            section("Workers", plots(fleet_plots(timeline, *span_s))),
        ),
    )


def _facts(timeline: Timeline) -> list[tuple[str, str]]:
    lines = timeline.requests.values()
    outcomes = Counter(line.outcome or "open" for line in lines)
    moved = sum(line.hops[-1].attempt > 1 for line in lines if line.hops)
    return [
        ("requests", f"{len(lines):,}"),
        *((outcome, f"{count:,}") for outcome, count in sorted(outcomes.items())),
        ("moved to another worker", f"{moved:,}"),
        ("workers", f"{len(timeline.workers):,}"),
        ("seconds", f"{timeline.end_s - (timeline.start_s or 0.0):,.4g}"),
    ]


def log_record(line: RequestLine, end_s: float) -> RequestRecord:
    """Return a record of a request for the plots.

    Without a logged first token of a finished request, the time of its first start on a worker stands in for it.
    """
    closed_s = end_s if line.closed_s is None else line.closed_s
    begun_s = line.hops[0].at_s if line.hops else closed_s
    times_s = [begun_s if line.first_token_s is None else line.first_token_s, closed_s]
    if line.outcome != "finished":
        times_s = [] if line.first_token_s is None else [line.first_token_s]
    return RequestRecord(
        arrival_s=line.arrived_s,
        end_s=closed_s,
        outcome=line.outcome or "cancelled",
        input_tokens=line.request.prompt_tokens,
        token_times_s=times_s,
        slo=line.request.slo,
    )
