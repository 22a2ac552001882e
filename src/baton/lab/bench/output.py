"""The output of `baton bench`: a progress bar, tables in milliseconds, remarks on validity, an HTML page."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from baton.lab.bench.client import Reply
from baton.lab.bench.options import ClosedLoop, OpenLoop, Pacing
from baton.lab.bench.run import BenchReport, RunListener
from baton.lab.report.run_page import RunPage, milliseconds, render_run
from baton.lab.workload.arrivals import AllAtOnce
from baton.lab.workload.retime import describe_arrivals

REASONS_MAX = 5
"""Maximum number of different failure reasons in the output."""
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
    """Return TTFT, TPOT, ITL and E2E in milliseconds."""
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
        table.add_row(name, *milliseconds(seconds))
    return table


def facts_table(report: BenchReport) -> Table:
    """Return the results that are single numbers."""
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
    """Yield remarks on conditions that limit the validity of the results."""
    if report.interrupted:
        yield "stopped early: the results leave out requests that were open"
    for reason, count in report.failures[:REASONS_MAX]:
        yield f"{count} x {reason}"
    if len(report.failures) > REASONS_MAX:
        yield f"and {len(report.failures) - REASONS_MAX} other reasons"
    if report.late_p99_s is not None and report.late_p99_s > _LATE_NOTABLE_S:
        yield "requests were sent late: this machine could not keep the schedule; lower the rate"
    if report.target.prompt_format == "text":
        yield "prompts were sent as text: lengths are approximate, and counted by the server"
        if report.options.prompt_format is None:
            yield "token ids were refused; if the vocabulary is small, give --vocab-tokens"
    if any(reply.counted_by == "chunks" for reply in report.replies if not reply.reason):
        yield "the server reports no usage: output tokens were counted as chunks of the stream"
    if report.short_answers:
        yield f"answers shorter than requested, ended by the server: {report.short_answers}"
    if report.load.shortened:
        yield f"requests shortened to fit {report.options.context_tokens} tokens: {report.load.shortened}"
    if report.load.left_out:
        yield f"turns left out of conversations beyond {report.options.context_tokens} tokens: {report.load.left_out}"
    if report.load.source.startswith("synthetic") and (report.results.prefix_hit_ratio or 0) > _HIT_NOTABLE_RATIO:
        yield "prompts of an earlier run were still cached; another --seed makes new prompts"


def _targets(report: BenchReport) -> Iterator[str]:
    slo = report.options.slo
    if slo.ttft_s is not None:
        yield f"TTFT {slo.ttft_s * 1000:g} ms"
    if slo.tpot_s is not None:
        yield f"TPOT {slo.tpot_s * 1000:g} ms"


def _number(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.2f} {unit}"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio * 100:.1f} %"


def render_html(report: BenchReport) -> str:
    """Return the run as one HTML page."""
    return render_run(
        RunPage(
            title=f"baton bench: {report.target.model}",
            subtitle=report.options.url,
            facts=list(facts(report)),
            remarks=list(remarks(report)),
            results=report.results,
            records=[reply.record for reply in report.replies],
            slo=report.options.slo,
            timeline=report.timeline,
        )
    )


@contextmanager
def watching(console: Console) -> Generator[RunListener]:
    """Show a progress bar while the block runs, if the console is a terminal."""
    if not console.is_terminal:
        yield RunListener()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
        bar = _ReplyBar(progress, progress.add_task("warming up", total=None))
        yield RunListener(on_start=bar.start, on_reply=bar.advance)


class _ReplyBar:
    """A progress bar of replies, with the number of those that did not finish."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._bad = 0

    def start(self, requests: int) -> None:
        self._progress.update(self._task, description="requests", total=requests)

    def advance(self, reply: Reply) -> None:
        self._bad += reply.record.outcome != "finished"
        words = f"requests ({self._bad} not finished)" if self._bad else "requests"
        self._progress.update(self._task, advance=1, description=words)
