"""A run on the screen: milliseconds, and what a reader should know before believing them."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from baton.lab.bench.options import ClosedLoop, OpenLoop, Pacing
from baton.lab.bench.run import BenchReport
from baton.lab.report.summary import Distribution
from baton.lab.workload.arrivals import AllAtOnce
from baton.lab.workload.retime import describe_arrivals

REASONS_MAX = 5
"""Reasons of failures that are shown."""
_LATE_NOTABLE_S = 0.01
_HIT_NOTABLE_RATIO = 0.01


def describe_pacing(pacing: Pacing) -> str:
    match pacing:
        case OpenLoop(None, arrivals):
            return f"open loop, {describe_arrivals(arrivals)}" + (
                "" if arrivals == AllAtOnce() else ", rate of the trace"
            )
        case OpenLoop(rate_rps, arrivals):
            return f"open loop, {rate_rps:g} requests/s ({describe_arrivals(arrivals)})"
        case ClosedLoop(concurrency):
            return f"closed loop, concurrency {concurrency}"
        case _:
            return "open loop, times of the trace"


def latency_table(report: BenchReport) -> Table:
    """TTFT, TPOT, ITL and E2E in milliseconds."""
    table = Table(title=f"{report.target.model} at {report.options.url}", title_justify="left")
    table.add_column("ms")
    for name in ("mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    results = report.results
    for name, seconds in (
        ("TTFT", results.ttft_s),
        ("TPOT", results.tpot_s),
        ("ITL", results.itl_s),
        ("E2E", results.e2e_s),
    ):
        table.add_row(name, *_milliseconds(seconds))
    return table


def facts_table(report: BenchReport) -> Table:
    """Everything that is one number."""
    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column(justify="right")
    for name, value in facts(report):
        table.add_row(name, value)
    return table


def facts(report: BenchReport) -> Iterator[tuple[str, str]]:
    results = report.results
    yield "load", report.load.source
    yield "pacing", describe_pacing(report.options.pacing)
    yield "requests", f"{results.requests} of {len(report.load.requests)}"
    yield "completed / failed / rejected", f"{results.completed} / {results.failed} / {results.rejected}"
    yield "duration", _number(results.duration_s, "s")
    yield "requests", _number(results.requests_per_s, "/s")
    yield "input tokens", _number(results.input_tokens_per_s, "/s")
    yield "output tokens", _number(results.output_tokens_per_s, "/s")
    if report.options.slo.given:
        yield "SLO", ", ".join(_targets(report))
    if results.slo.attainment_ratio is not None:
        yield "SLO attainment", _percent(results.slo.attainment_ratio)
        yield "goodput", _number(results.goodput_rps, "requests/s")
    yield "prefix hit", _percent(results.prefix_hit_ratio)
    if report.late_p99_s is not None:
        yield "schedule slip p99", f"{report.late_p99_s * 1000:.2f} ms"


def remarks(report: BenchReport) -> Iterator[str]:
    """What limits the figures above."""
    if report.interrupted:
        yield "stopped early: requests that were open are in no figure"
    for reason, count in report.failures[:REASONS_MAX]:
        yield f"{count} x {reason}"
    if len(report.failures) > REASONS_MAX:
        yield f"and {len(report.failures) - REASONS_MAX} other reasons"
    if report.late_p99_s is not None and report.late_p99_s > _LATE_NOTABLE_S:
        yield "requests were sent late: this machine could not keep the schedule, lower the rate"
    if report.target.prompt_format == "text":
        yield "prompts were sent as text: their lengths are about those asked for, and counted by the server"
        if report.options.prompt_format is None:
            yield "token ids were not taken; if the vocabulary is small, give --vocab-tokens"
    if any(reply.counted_by == "chunks" for reply in report.replies if not reply.reason):
        yield "the server tells no usage: output tokens were counted as chunks of the stream"
    if report.short_answers:
        yield f"answers shorter than asked for, ended by the server: {report.short_answers}"
    if report.load.shortened:
        yield f"requests shortened to fit {report.options.context_tokens} tokens: {report.load.shortened}"
    if report.load.source.startswith("synthetic") and (report.results.prefix_hit_ratio or 0) > _HIT_NOTABLE_RATIO:
        yield "prompts of an earlier run were still cached; another --seed makes new ones"


def _targets(report: BenchReport) -> Iterator[str]:
    slo = report.options.slo
    if slo.ttft_s is not None:
        yield f"TTFT {slo.ttft_s * 1000:g} ms"
    if slo.tpot_s is not None:
        yield f"TPOT {slo.tpot_s * 1000:g} ms"


def _milliseconds(seconds: Distribution) -> list[str]:
    values = (seconds.mean, seconds.p50, seconds.p90, seconds.p99)
    return ["-" if value is None else f"{value * 1000:,.2f}" for value in values]


def _number(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.2f} {unit}"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio * 100:.1f} %"
