"""A run as one HTML file without a script or a link: distributions and a timeline as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

from baton.bench.client import Reply
from baton.bench.run import Report
from baton.bench.table import facts, remarks
from baton.metrics.summary import Distribution, token_gaps_s

POINTS_MAX = 400
"""Of a curve; it is drawn through as many quantiles."""
LINES_MAX = 1500
"""Requests in the timeline; of a longer run every nth is drawn, and the page says so."""
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 260, 56, 36, 12

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#6b7686;--line:#d5dae1;--back:#fff;--a:#2463c9;--b:#d9822b;
--bad:#c4302b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#97a1b0;--line:#353d49;--back:#15191f;--a:#6ea3f7;
--b:#f0a35e;--bad:#f0726d}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:1360px;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.05rem;margin:1.6rem 0 .4rem}
table{border-collapse:collapse}
td,th{padding:.2rem .8rem .2rem 0;text-align:right;border-bottom:1px solid var(--line)}
td:first-child,th:first-child{text-align:left}
.plots{display:flex;flex-wrap:wrap;gap:1rem 2rem}.plots>section{flex:1 1 420px}
svg{width:100%;height:auto}text{fill:var(--soft);font-size:11px}
.axis{stroke:var(--line)}.curve{fill:none;stroke:var(--a);stroke-width:2}
.wait{stroke:var(--b)}.decode{stroke:var(--a)}.bad{stroke:var(--bad)}.mark{stroke:var(--soft);stroke-dasharray:3 3}
.key{color:var(--soft)}.key b.w{color:var(--b)}.key b.d{color:var(--a)}.key b.x{color:var(--bad)}
"""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Data to pixels, on both axes from 0."""

    x_max: float
    y_max: float

    def x(self, value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - 12) * value / self.x_max, 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / self.y_max, 1)


def render_html(report: Report) -> str:
    """The whole page."""
    done = [reply.record for reply in report.replies if reply.record.outcome == "finished"]
    ttft_s = [value for record in done if (value := record.ttft_s) is not None]
    tpot_s = [value for record in done if (value := record.tpot_s) is not None]
    slo = report.options.slo
    plots = (
        _plot("Time to first token", _cdf(ttft_s, slo.ttft_s)),
        _plot("Time per output token, per request", _cdf(tpot_s, slo.tpot_s)),
        _plot("Inter-token latency, every gap", _cdf(token_gaps_s(done), None)),
        _timeline_section(report.replies),
    )
    title = f"baton bench: {escape(report.target.model)}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{title}</h1><p>{escape(report.options.url)}</p>{_latencies(report)}{_facts(report)}"
        f'<div class="plots">{"".join(plots)}</div></body></html>\n'
    )


def _latencies(report: Report) -> str:
    results = report.results
    rows = (("TTFT", results.ttft_s), ("TPOT", results.tpot_s), ("ITL", results.itl_s), ("E2E", results.e2e_s))
    head = "<tr><th>ms</th><th>mean</th><th>p50</th><th>p90</th><th>p99</th></tr>"
    return f"<table>{head}{''.join(_latency_row(name, seconds) for name, seconds in rows)}</table>"


def _latency_row(name: str, seconds: Distribution) -> str:
    values = (seconds.mean, seconds.p50, seconds.p90, seconds.p99)
    cells = "".join(f"<td>{'-' if value is None else f'{value * 1000:,.2f}'}</td>" for value in values)
    return f"<tr><td>{name}</td>{cells}</tr>"


def _facts(report: Report) -> str:
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts(report))
    notes = "".join(f"<li>{escape(remark)}</li>" for remark in remarks(report))
    return f"<h2>Run</h2><table>{rows}</table><ul>{notes}</ul>"


def _plot(title: str, svg: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{svg}</section>"


def _cdf(values_s: Sequence[float] | npt.NDArray[np.float64], target_s: float | None) -> str:
    """Share of values at or below x milliseconds. The axis ends at p99.5, so that one straggler hides nothing."""
    if not len(values_s):
        return "<p>nothing to show</p>"
    shares = np.linspace(0, 1, POINTS_MAX)
    values_ms = np.quantile(np.asarray(values_s, np.float64), shares) * 1000
    x_max = max(float(np.quantile(values_ms, 0.995)), (target_s or 0) * 1000, 1e-3) * 1.02
    scale = _Scale(x_max, 1.0)
    points = " ".join(
        f"{scale.x(value)},{scale.y(share)}"
        for value, share in zip(values_ms.tolist(), shares.tolist(), strict=True)
        if value <= x_max
    )
    target = "" if target_s is None else _vertical(scale, target_s * 1000)
    return _svg(f'{_axes(scale, "ms", "share")}{target}<polyline class="curve" points="{points}"/>', "distribution")


def _vertical(scale: _Scale, value: float) -> str:
    x = scale.x(value)
    return f'<line class="mark" x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'


def _timeline_section(replies: Sequence[Reply]) -> str:
    ordered = sorted(replies, key=lambda reply: reply.record.arrival_s)
    every = -(-len(ordered) // LINES_MAX) or 1
    shown = ordered[::every]
    key = '<b class="w">waiting for the first token</b>, <b class="d">decoding</b>, <b class="x">not finished</b>'
    sampled = f"; every {every}th request" if every > 1 else ""
    return _plot("Timeline", f'{_timeline(shown)}<p class="key">{key}{sampled}</p>')


def _timeline(replies: Sequence[Reply]) -> str:
    if not replies:
        return "<p>nothing to show</p>"
    start_s = replies[0].record.arrival_s
    end_s = max(reply.record.end_s for reply in replies)
    scale = _Scale(max(end_s - start_s, 1e-3), float(len(replies)))
    lines = "".join(_life(scale, row, reply, start_s) for row, reply in enumerate(replies))
    return _svg(f"{_axes(scale, 's', 'request')}{lines}", "timeline")


def _life(scale: _Scale, row: int, reply: Reply, start_s: float) -> str:
    record = reply.record
    y = scale.y(row + 0.5)
    begin, end = scale.x(record.arrival_s - start_s), scale.x(record.end_s - start_s)
    if record.outcome != "finished":
        return _line("bad", begin, max(end, begin + 1), y)
    first = scale.x(record.token_times_s[0] - start_s)
    return _line("wait", begin, first, y) + _line("decode", first, end, y)


def _line(kind: str, x1: float, x2: float, y: float) -> str:
    return f'<line class="{kind}" x1="{x1}" x2="{x2}" y1="{y}" y2="{y}"/>'


def _axes(scale: _Scale, x_unit: str, y_name: str) -> str:
    """Frame, five ticks on each axis, their numbers."""
    parts = [
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - 12}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>',
        f'<line class="axis" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>',
        f'<text x="{WIDTH - 12}" y="{HEIGHT - 4}" text-anchor="end">{x_unit}</text>',
        f'<text x="4" y="{TOP + 2}">{y_name}</text>',
    ]
    for fifth in range(6):
        x, y = scale.x_max * fifth / 5, scale.y_max * fifth / 5
        parts.append(f'<text x="{scale.x(x)}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{x:.4g}</text>')
        parts.append(f'<text x="{LEFT - 6}" y="{scale.y(y) + 4}" text-anchor="end">{y:.3g}</text>')
    return "".join(parts)


def _svg(content: str, name: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{content}</svg>'
