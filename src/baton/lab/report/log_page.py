"""Render a decision log as an HTML page: the activity of its workers and the latencies of its requests."""

from __future__ import annotations

from collections import Counter

from baton.lab.report.fleet_plots import fleet_plots
from baton.lab.report.page import page, plots, section, tiles
from baton.lab.report.run_plots import e2e_plot, lives_plot, load_plots, ttft_plot
from baton.lab.report.summary import RequestRecord, SloTargets
from baton.lab.report.timeline import RequestLine, Timeline


def render_log(timeline: Timeline, name: str) -> str:
    """Return the page.

    A log holds the time of a request's first token and its token count, but no other token times.
    """
    lines = list(timeline.requests.values())
    records = [_record(line, timeline.end_s) for line in lines]
    known = [_record(line, timeline.end_s) for line in lines if line.first_token_s is not None]
    return page(
        f"decision log: {name}",
        "times as the coordinator saw them",
        (
            tiles(_facts(timeline)),
            section("Latency", plots([ttft_plot(known, SloTargets()), e2e_plot(records)])),
            section("Over time", plots([*load_plots(records), lives_plot(records)])),
            section("Workers", plots(fleet_plots(timeline))),
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


def _record(line: RequestLine, end_s: float) -> RequestRecord:
    """Return a record of a request for the plots.

    Without a logged first token, the time of its first start on a worker stands in for it.
    """
    closed_s = end_s if line.closed_s is None else line.closed_s
    first_s = line.first_token_s if line.first_token_s is not None else line.hops[0].at_s if line.hops else closed_s
    return RequestRecord(
        arrival_s=line.arrived_s,
        end_s=closed_s,
        outcome=line.outcome or "cancelled",
        input_tokens=line.request.prompt_tokens,
        token_times_s=[first_s, closed_s] if line.outcome == "finished" else [],
        slo=line.request.slo,
    )
