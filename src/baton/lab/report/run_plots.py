"""Plots of client metrics: distributions of latencies, and load, output and SLO attainment over time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.core.messages import Outcome
from baton.lab.report import bins
from baton.lab.report.bins import Values
from baton.lab.report.drawings import (
    DASHED,
    DOTTED,
    Color,
    Curves,
    Format,
    Mark,
    RequestLanes,
    Series,
    known,
    rounded,
    short,
)
from baton.lab.report.page import plot
from baton.lab.report.summary import RequestRecord, SloTargets, token_gaps_s

POINTS_MAX = 300
"""Points of a distribution curve, one quantile each."""
TARGET_SHOWN_MAX = 3.0
"""A target above this multiple of the plotted latencies is written as text, not drawn."""
BINS = 120
"""Bins over the duration of a run."""
LIVES_MAX = 1000
"""Bound on the drawn requests. Of a longer run every nth request is drawn, and the page says so."""
LIVES_HEIGHT = 360
"""Height of the plot of all requests, in pixels, if there are many."""
GAPS_MAX = 2_000_000
"""Tokens whose gaps are sorted by time. Of a longer run every nth request counts."""
SHARES = (0.5, 0.9, 0.99)


def latency_plots(records: Sequence[RequestRecord], slo: SloTargets) -> list[str]:
    """Return the plots of the distributions of TTFT, TPOT, ITL and E2E of completed requests."""
    done = [record for record in records if record.outcome == "finished"]
    tpot_s = [value for record in done if (value := record.tpot_s) is not None]
    return [
        ttft_plot(records, slo),
        _distribution("Time per output token, per request (TPOT)", np.asarray(tpot_s), slo.tpot_s),
        _distribution("Inter-token latency, every gap (ITL)", token_gaps_s(done), None),
        e2e_plot(records),
    ]


def ttft_plot(records: Sequence[RequestRecord], slo: SloTargets) -> str:
    values_s = [value for record in records if record.outcome == "finished" and (value := record.ttft_s) is not None]
    return _distribution("Time to first token (TTFT)", np.asarray(values_s), slo.ttft_s)


def e2e_plot(records: Sequence[RequestRecord]) -> str:
    values_s = [value for record in records if record.outcome == "finished" and (value := record.e2e_s) is not None]
    return _distribution("End to end (E2E)", np.asarray(values_s), None)


def distribution(label: str, values_s: Values) -> Series:
    """Return the cumulative distribution of latencies as a curve. There must be at least one value."""
    shares = np.linspace(0, 1, POINTS_MAX)
    points = np.quantile(values_s, shares)
    return Series(label=label, color="--decode", x=rounded(points.tolist()), values=rounded(shares.tolist()), width=2)


def _distribution(title: str, values_s: Values, target_s: float | None) -> str:
    """Return the plot of the cumulative distribution. The axis ends at p99.5, or at the target if that is near.

    An outlier or a distant target would compress the curve.
    """
    if not len(values_s):
        return ""
    p50, p99, last = np.quantile(values_s, (0.5, 0.99, 0.995)).tolist()
    marks, words = [Mark(p50, "p50"), Mark(p99, "p99")], f"p50 {seconds(p50)}, p99 {seconds(p99)}"
    x_max_s = max(last, 1e-6)
    if target_s is not None:
        words += f"; SLO {seconds(target_s)}: met by {float(np.mean(values_s <= target_s)):.1%}"
        if target_s <= TARGET_SHOWN_MAX * last:
            marks.append(Mark(target_s, "SLO"))
            x_max_s = max(x_max_s, target_s)
        else:
            words += ", beyond this axis"
    drawing = Curves(
        series=[distribution("share at most as long", values_s)],
        format="share",
        x_max=x_max_s * 1.03,
        x_format="seconds",
        floor=0.91,  # the axis ends a tenth above it, at 100 %
        marks=marks,
    )
    return plot(title, drawing, words)


def seconds(value: float) -> str:
    return f"{value * 1000:,.4g} ms" if value < 2 else f"{value:,.4g} s"


def time_plots(records: Sequence[RequestRecord], slo: SloTargets, start_s: float, end_s: float) -> list[str]:
    """Return the plots over time that the dashboard has too, then open requests, arrivals and SLO attainment.

    `start_s`, `end_s`: ends of the page's time axis, on the records' clock.
    """
    if not records:
        return []
    borders = bins.edges(0.0, end_s - start_s, BINS)
    return [
        *_percentile_plots(records, slo, start_s, borders),
        _token_plot(records, start_s, borders),
        _outcome_plot(records, slo, start_s, borders),
        *load_plots(records, start_s, end_s),
        _attainment(records, slo, start_s, borders),
    ]


def load_plots(records: Sequence[RequestRecord], start_s: float, end_s: float) -> list[str]:
    """Return plots over time of open requests and arrivals per second."""
    if not records:
        return []
    borders = bins.edges(0.0, end_s - start_s, BINS)
    arrivals_s = np.asarray([record.arrival_s - start_s for record in records])
    first_s = np.asarray([(r.token_times_s[0] if len(r.token_times_s) else r.end_s) - start_s for r in records])
    ends_s = np.asarray([record.end_s - start_s for record in records])
    waiting = bins.open_counts(arrivals_s.tolist(), first_s.tolist(), borders)
    decoding = bins.open_counts(first_s.tolist(), ends_s.tolist(), borders)
    under_way = [
        binned("until the first token", "--prefill", borders, waiting),
        binned("decoding", "--decode", borders, decoding, DASHED),
    ]
    arrived = [binned("arrivals", "--mixed", borders, rates(arrivals_s, borders))]
    return [
        plot("Requests under way", over_time(under_way, "number", borders)),
        plot("Arrivals per second", over_time(arrived, "rate", borders)),
    ]


def over_time(
    series: Sequence[Series], form: Format, borders: Values, *, limits: Sequence[float] = (), floor: float = 0.0
) -> Curves:
    """Return curves over the time of the run."""
    return Curves(series=series, format=form, end_s=float(borders[-1]), limits=limits, floor=floor)


def _middles(borders: Values) -> list[float]:
    return rounded(((borders[:-1] + borders[1:]) / 2).tolist())


def binned(label: str, color: Color, borders: Values, values: Values, dash: tuple[int, ...] = ()) -> Series:
    """Return a curve with a value for each bin, at the bin's middle."""
    return Series(label=label, color=color, x=_middles(borders), values=known(values.tolist()), dash=dash)


def rates(times_s: Values, borders: Values) -> Values:
    return bins.counts(times_s, borders) / np.diff(borders)


def _percentile_plots(records: Sequence[RequestRecord], slo: SloTargets, start_s: float, borders: Values) -> list[str]:
    """Return the plots of TTFT and ITL over time. A latency counts at the time at which it ended."""
    begun = [record for record in records if len(record.token_times_s)]
    if not begun:
        return []
    first_s = np.asarray([record.token_times_s[0] for record in begun])
    ttft_s = first_s - np.asarray([record.arrival_s for record in begun])
    part = begun[:: -(-sum(record.output_tokens for record in begun) // GAPS_MAX)]
    token_s = np.concatenate([np.asarray(record.token_times_s, np.float64)[1:] for record in part])
    gaps_s = token_gaps_s(part)
    found: list[str] = []
    for title, at_s, values_s, target_s in (
        ("Time to first token", first_s, ttft_s, slo.ttft_s),
        ("Inter-token latency", token_s, gaps_s, slo.tpot_s),
    ):
        if len(values_s):
            p50, p90, p99 = bins.quantiles(at_s - start_s, values_s, borders, SHARES)
            series = [
                binned("p50", "--p50", borders, p50, DOTTED),
                binned("p90", "--p90", borders, p90, DASHED),
                binned("p99", "--p99", borders, p99),
            ]
            limits = [] if target_s is None else [target_s]
            note = "" if target_s is None else "dashed: SLO"
            found.append(plot(title, over_time(series, "seconds", borders, limits=limits), note))
    return found


def _token_plot(records: Sequence[RequestRecord], start_s: float, borders: Values) -> str:
    """Return the plot of tokens per second. A prompt counts with its first token."""
    begun = [record for record in records if len(record.token_times_s)]
    output_s = np.concatenate([np.asarray(record.token_times_s, np.float64) for record in records]) - start_s
    first_s = np.asarray([record.token_times_s[0] - start_s for record in begun])
    prompts = np.histogram(first_s, borders, weights=[record.input_tokens for record in begun])[0]
    series = [
        binned("output", "--decode", borders, rates(output_s, borders)),
        binned("prompt", "--prefill", borders, prompts / np.diff(borders)),
    ]
    if any(record.cached_tokens is not None for record in begun):
        cached = np.histogram(first_s, borders, weights=[record.cached_tokens or 0 for record in begun])[0]
        series.append(binned("cached", "--mixed", borders, cached / np.diff(borders), DASHED))
    return plot("Tokens", over_time(series, "rate", borders))


def _outcome_plot(records: Sequence[RequestRecord], slo: SloTargets, start_s: float, borders: Values) -> str:
    """Return the plot of ended requests per second."""
    finished = [record for record in records if record.outcome == "finished"]

    def rate(ended: Sequence[RequestRecord]) -> Values:
        return rates(np.asarray([record.end_s - start_s for record in ended]), borders)

    series = [binned("finished", "--mixed", borders, rate(finished))]
    if slo.given or any(record.slo is not None for record in records):
        met = [record for record in finished if slo.met_by(record)]
        series.append(binned("in SLO", "--decode", borders, rate(met), DASHED))
    refused = [record for record in records if record.outcome == "rejected"]
    failed = [record for record in records if record.outcome == "failed"]
    series += [
        binned("refused", "--prefill", borders, rate(refused)),
        binned("failed", "--bad", borders, rate(failed), DOTTED),
    ]
    return plot("Requests", over_time(series, "rate", borders))


def _attainment(records: Sequence[RequestRecord], slo: SloTargets, start_s: float, borders: Values) -> str:
    """Return the plot of SLO attainment by time of arrival. Bins without arrivals have no value."""
    if not slo.given and all(record.slo is None for record in records):
        return ""
    judged = [record for record in records if record.outcome != "cancelled"]
    coarse = borders[:: max(1, len(borders) // 40)]
    every = bins.counts([record.arrival_s - start_s for record in judged], coarse)
    met = bins.counts([record.arrival_s - start_s for record in judged if slo.met_by(record)], coarse)
    shares = np.divide(met, every, out=np.full(len(every), np.nan), where=every > 0)
    series = [binned("met the SLO", "--decode", coarse, shares)]
    drawing = Curves(series=series, format="share", end_s=float(borders[-1]), floor=0.91)
    return plot("SLO attainment, by time of arrival", drawing)


def lives_plot(records: Sequence[RequestRecord], start_s: float, end_s: float) -> str:
    """Return a plot with a lane per request, from its arrival to its end."""
    if not records:
        return ""
    ordered = sorted(records, key=lambda record: record.arrival_s)
    every = -(-len(ordered) // LIVES_MAX)
    shown = ordered[::every]
    rows: list[tuple[float, float | None, float, Outcome, int]] = [
        (
            short(record.arrival_s - start_s),
            short(record.token_times_s[0] - start_s) if len(record.token_times_s) else None,
            short(record.end_s - start_s),
            record.outcome,
            record.output_tokens,
        )
        for record in shown
    ]
    height = min(12.0, max(0.5, LIVES_HEIGHT / len(rows)))
    drawing = RequestLanes(end_s=end_s - start_s, requests=rows, row_height=height)
    note = "by arrival: until the first token, then decoding; red: not finished"
    return plot("Every request", drawing, note + (f"; one of every {every} requests" if every > 1 else ""), wide=True)
