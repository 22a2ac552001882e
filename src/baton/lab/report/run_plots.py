"""Plots of client metrics: distributions of latencies, and load, output and SLO attainment over time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.lab.report import bins, svg
from baton.lab.report.bins import Values
from baton.lab.report.page import plot
from baton.lab.report.summary import RequestRecord, SloTargets, token_gaps_s
from baton.lab.report.svg import Frame

POINTS_MAX = 300
"""Points of a distribution curve, one quantile each."""
TARGET_SHOWN_MAX = 3.0
"""A target above this multiple of the plotted latencies is written as text, not drawn."""
BINS = 120
"""Bins over the duration of a run."""
LIVES_MAX = 1000
"""Bound on the drawn requests. Of a longer run every nth request is drawn, and the page says so."""


def latency_plots(records: Sequence[RequestRecord], slo: SloTargets) -> list[str]:
    """Return the plots of TTFT, TPOT, ITL and E2E of completed requests."""
    done = [record for record in records if record.outcome == "finished"]
    tpot_s = [value for record in done if (value := record.tpot_s) is not None]
    return [
        ttft_plot(records, slo),
        plot("Time per output token, per request (TPOT)", _distribution(np.asarray(tpot_s), slo.tpot_s, "TPOT")),
        plot("Inter-token latency, every gap (ITL)", _distribution(token_gaps_s(done), None, "ITL")),
        e2e_plot(records),
    ]


def ttft_plot(records: Sequence[RequestRecord], slo: SloTargets) -> str:
    values_s = [value for record in records if record.outcome == "finished" and (value := record.ttft_s) is not None]
    return plot("Time to first token (TTFT)", _distribution(np.asarray(values_s), slo.ttft_s, "TTFT"))


def e2e_plot(records: Sequence[RequestRecord]) -> str:
    values_s = [value for record in records if record.outcome == "finished" and (value := record.e2e_s) is not None]
    return plot("End to end (E2E)", _distribution(np.asarray(values_s), None, "E2E"))


def _distribution(values_s: Values, target_s: float | None, name: str) -> str:
    """Return the plot of the cumulative distribution. The axis ends at p99.5, or at the target if that is near.

    An outlier or a distant target would compress the curve.
    """
    if not len(values_s):
        return ""
    shares = np.linspace(0, 1, POINTS_MAX)
    p50, p99, last = np.quantile(values_s, (0.5, 0.99, 0.995)).tolist()
    is_near = target_s is not None and target_s <= TARGET_SHOWN_MAX * last
    x_max_s = max(last, target_s if target_s is not None and is_near else 0.0, 1e-6) * 1.03
    unit, scale = ("s", 1.0) if x_max_s > 2 else ("ms", 1000.0)
    points = np.quantile(values_s, shares) * scale
    frame = Frame(x_max_s * scale, 1.0)
    shown = points <= x_max_s * scale
    parts = [
        frame.axes(unit, "share of requests" if name != "ITL" else "share of gaps"),
        svg.polyline(frame, points[shown].tolist(), shares[shown].tolist()),
        svg.vertical(frame, p50 * scale, f"p50 {p50 * scale:,.4g} {unit}", above=0),
        svg.vertical(frame, p99 * scale, f"p99 {p99 * scale:,.4g} {unit}", above=1),
    ]
    if target_s is not None:
        attained = float(np.mean(values_s <= target_s))
        words = f"SLO {target_s * scale:g} {unit}: met by {attained:.1%}"
        if is_near:
            parts.append(svg.polyline(frame, [target_s * scale] * 2, [0.0, 1.0], "bad"))
            parts.append(svg.vertical(frame, target_s * scale, words, above=2))
        else:
            parts.append(svg.beside(frame, frame.width, frame.height / 2, f"{words}, beyond this axis"))
    return svg.svg(frame, "".join(parts), f"distribution of {name}")


def time_plots(records: Sequence[RequestRecord], slo: SloTargets) -> list[str]:
    """Return plots over time: open requests, arrivals and tokens per second, and SLO attainment."""
    if not records:
        return []
    start_s, borders = _span(records)
    tokens_s = np.concatenate([np.asarray(record.token_times_s, np.float64) for record in records])
    return [
        *load_plots(records),
        plot("Output tokens per second", _rate(tokens_s - start_s, borders, "tokens/s")),
        plot("SLO attainment, by time of arrival", _attainment(records, slo, start_s, borders)),
    ]


def load_plots(records: Sequence[RequestRecord]) -> list[str]:
    """Return plots over time of open requests and arrivals per second."""
    if not records:
        return []
    start_s, borders = _span(records)
    arrivals_s = [record.arrival_s - start_s for record in records]
    return [
        plot(
            "Requests under way",
            _under_way(records, start_s, borders),
            'until the first token <i class="b">prefill and queues</i>, then <i class="a">decode</i>',
        ),
        plot("Arrivals per second", _rate(arrivals_s, borders, "requests/s")),
    ]


def _span(records: Sequence[RequestRecord]) -> tuple[float, Values]:
    """Return the time of the first arrival, and bin borders from there to the last end."""
    start_s = min(record.arrival_s for record in records)
    return start_s, bins.edges(0.0, max(record.end_s for record in records) - start_s, BINS)


def _under_way(records: Sequence[RequestRecord], start_s: float, borders: Values) -> str:
    arrivals_s = [record.arrival_s - start_s for record in records]
    firsts_s = [(r.token_times_s[0] if len(r.token_times_s) else r.end_s) - start_s for r in records]
    waiting = bins.open_counts(arrivals_s, firsts_s, borders)
    decoding = bins.open_counts(firsts_s, [record.end_s - start_s for record in records], borders)
    frame = Frame(float(borders[-1]), max(float(waiting.max()), float(decoding.max()), 1.0) * 1.05)
    content = frame.axes("s", "requests")
    content += svg.steps(frame, borders.tolist(), decoding.tolist(), "a")
    content += svg.steps(frame, borders.tolist(), waiting.tolist(), "b")
    return svg.svg(frame, content, "requests under way")


def _rate(times_s: Sequence[float] | Values, borders: Values, unit: str) -> str:
    rates = bins.counts(times_s, borders) / np.diff(borders)
    frame = Frame(float(borders[-1]), max(float(rates.max()), 1e-9) * 1.05)
    content = frame.axes("s", unit) + svg.steps(frame, borders.tolist(), rates.tolist(), "c")
    return svg.svg(frame, content, f"rate in {unit}")


def _attainment(records: Sequence[RequestRecord], slo: SloTargets, start_s: float, borders: Values) -> str:
    """Return the plot of SLO attainment by time of arrival. Bins without arrivals stay empty."""
    if not slo.given and all(record.slo is None for record in records):
        return ""
    judged = [record for record in records if record.outcome != "cancelled"]
    coarse = borders[:: max(1, len(borders) // 40)]
    every = bins.counts([record.arrival_s - start_s for record in judged], coarse)
    met = bins.counts([record.arrival_s - start_s for record in judged if slo.met_by(record)], coarse)
    frame = Frame(float(borders[-1]), 1.0)
    content = frame.axes("s", "share that met the SLO")
    for left, right, hits, total in zip(coarse[:-1], coarse[1:], met, every, strict=True):
        if total:
            y = frame.y(float(hits / total))
            height = round(frame.y(0) - y, 1)
            words = f"{int(hits)} of {int(total)} requests that came from {left:.4g} to {right:.4g} s"
            box = (frame.x(float(left)) + 0.5, frame.x(float(right)) - 0.5, y, max(height, 1.0))
            content += svg.rectangle(box, "decode", words, 0.75)
    return svg.svg(frame, content, "SLO attainment over time")


def lives_plot(records: Sequence[RequestRecord]) -> str:
    """Return a plot with one line per request, from its arrival to its end."""
    if not records:
        return ""
    ordered = sorted(records, key=lambda record: record.arrival_s)
    every = -(-len(ordered) // LIVES_MAX)
    shown = ordered[::every]
    start_s = ordered[0].arrival_s
    frame = Frame(max(record.end_s for record in records) - start_s, float(len(shown)), height=360, width=svg.WIDE)
    lines = "".join(_life(frame, row, record, start_s) for row, record in enumerate(shown))
    sampled = f"; one of every {every} requests" if every > 1 else ""
    key = f'<i class="b">until the first token</i>, <i class="a">decoding</i>, <i class="x">not finished</i>{sampled}'
    return plot(
        "Every request",
        svg.svg(frame, frame.axes("s", "request, in order of arrival") + lines, "timeline"),
        key,
        wide=True,
    )


def _life(frame: Frame, row: int, record: RequestRecord, start_s: float) -> str:
    y = frame.y(row + 0.5)
    begin, end = frame.x(record.arrival_s - start_s), frame.x(record.end_s - start_s)
    if record.outcome != "finished":
        return _line("bad", begin, max(end, begin + 1), y)
    first = frame.x(record.token_times_s[0] - start_s)
    return _line("wait", begin, first, y) + _line("decode", first, end, y)


def _line(kind: str, x1: float, x2: float, y: float) -> str:
    return f'<line class="{kind}" x1="{x1}" x2="{x2}" y1="{y}" y2="{y}"/>'
