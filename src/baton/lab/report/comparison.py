"""Compare runs of one trace: on several clusters, or with several policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np
from msgspec import Struct

from baton.lab.report import bins
from baton.lab.report.drawings import Color, Curves, Mark, Series
from baton.lab.report.page import notes, page, plot, plots, section, short_number, table
from baton.lab.report.run_plots import BINS, binned, distribution, over_time, rates, seconds
from baton.lab.report.summary import Distribution, RequestRecord, Results, SloTargets

COLORS: tuple[Color, ...] = ("--decode", "--prefill", "--mixed", "--other", "--bad")
DASHES: tuple[tuple[int, ...], ...] = ((), (6, 4), (2, 2))
RUNS_MAX = len(COLORS) * len(DASHES)
"""Bound on the runs of a comparison: each has a colour and a dash of its own."""
HEAD = (
    "cluster", "policy", "completed", "rejected", "failed", "TTFT ms p50 / p99", "TPOT ms p50 / p99", "tokens/s",
    "in SLO", "goodput",
)  # fmt: skip


class ComparedRun(Struct, frozen=True, kw_only=True):
    """One run of a comparison."""

    cluster: str
    policy: str
    results: Results


class Comparison(Struct, frozen=True, kw_only=True):
    """The JSON of a comparison."""

    runs: list[ComparedRun]


def comparison_rows(runs: Sequence[ComparedRun]) -> list[list[str]]:
    """Return the cells below `HEAD`, a row for each run."""
    return [[run.cluster, run.policy, *_cells(run.results)] for run in runs]


def _cells(results: Results) -> list[str]:
    attained = results.slo.attainment_ratio
    return [
        f"{results.completed:,}",
        f"{results.rejected:,}",
        f"{results.failed:,}",
        *(_two(latency) for latency in (results.ttft_s, results.tpot_s)),
        "-" if results.output_tokens_per_s is None else f"{results.output_tokens_per_s:,.0f}",
        "-" if attained is None else f"{attained:.1%}",
        "-" if results.goodput_rps is None else f"{results.goodput_rps:.4g}",
    ]


def _two(latency: Distribution) -> str:
    """Return p50 and p99 in milliseconds."""
    return " / ".join(short_number(None if value is None else value * 1000) for value in (latency.p50, latency.p99))


def render_comparison(
    runs: Sequence[ComparedRun], records: Sequence[Sequence[RequestRecord]], slo: SloTargets, facts: Sequence[str]
) -> str:
    """Return the HTML page of a comparison. `records`: those of each run."""
    names = [f"{run.policy} on {run.cluster}" for run in runs]
    return page(
        f"baton sim: {len(runs)} runs",
        "each run had the same requests, at the same times",
        (
            table(HEAD, comparison_rows(runs)),
            section("Latency", plots(_distributions(names, records, slo))),
            section("Over time", plots(_time_plots(names, records, slo))),
            section("Runs", notes(facts)),
        ),
    )


def _distributions(names: Sequence[str], records: Sequence[Sequence[RequestRecord]], slo: SloTargets) -> list[str]:
    """Return the plots of TTFT, TPOT and E2E of completed requests, with a curve for each run."""
    return [
        _distribution("Time to first token (TTFT)", names, records, attrgetter("ttft_s"), slo.ttft_s),
        _distribution("Time per output token, per request (TPOT)", names, records, attrgetter("tpot_s"), slo.tpot_s),
        _distribution("End to end (E2E)", names, records, attrgetter("e2e_s"), None),
    ]


def _distribution(
    title: str,
    names: Sequence[str],
    records: Sequence[Sequence[RequestRecord]],
    latency: Callable[[RequestRecord], float | None],
    target_s: float | None,
) -> str:
    series: list[Series] = []
    last_s = 0.0
    for number, (name, own) in enumerate(zip(names, records, strict=True)):
        done = (latency(record) for record in own if record.outcome == "finished")
        values_s = np.asarray([value_s for value_s in done if value_s is not None])
        if len(values_s):
            series.append(_styled(distribution(name, values_s), number))
            last_s = max(last_s, float(np.quantile(values_s, 0.99)))
    if not series:
        return ""
    marks = [] if target_s is None else [Mark(target_s, f"SLO {seconds(target_s)}")]
    drawing = Curves(series=series, format="share", x_max=last_s * 1.03, x_format="seconds", floor=0.91, marks=marks)
    return plot(title, drawing, "share of the requests, up to the highest p99", wide=True)


def _time_plots(names: Sequence[str], records: Sequence[Sequence[RequestRecord]], slo: SloTargets) -> list[str]:
    """Return the plots of output tokens and of requests within the SLO over time, with a curve for each run."""
    every = [record for own in records for record in own]
    if not every:
        return []
    start_s = min(record.arrival_s for record in every)
    borders = bins.edges(0.0, max(record.end_s for record in every) - start_s, BINS)
    tokens: list[Series] = []
    met: list[Series] = []
    for number, (name, own) in enumerate(zip(names, records, strict=True)):
        times_s = [np.asarray(record.token_times_s, np.float64) - start_s for record in own] or [np.zeros(0)]
        ends_s = np.asarray([record.end_s - start_s for record in own if slo.met_by(record)])
        tokens.append(_styled(binned(name, "--decode", borders, rates(np.concatenate(times_s), borders)), number))
        met.append(_styled(binned(name, "--decode", borders, rates(ends_s, borders)), number))
    found = [plot("Output tokens", over_time(tokens, "rate", borders), wide=True)]
    if slo.given or any(record.slo is not None for record in every):
        found.append(plot("Requests within the SLO", over_time(met, "rate", borders), wide=True))
    return found


def _styled(series: Series, number: int) -> Series:
    """Return a curve with the colour and the dash of the run with this number."""
    color, dash = COLORS[number % len(COLORS)], DASHES[number // len(COLORS)]
    return Series(label=series.label, color=color, x=series.x, values=series.values, dash=dash, width=2)
