"""Plots of workers: roles and queues over time, and heat maps of their load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from baton.lab.report import bins, svg
from baton.lab.report.bins import Values
from baton.lab.report.page import plot
from baton.lab.report.svg import LEFT, RIGHT, Frame
from baton.lab.report.timeline import Timeline, WorkerLine

BINS = 120
LINES_MAX = 48
"""Bound on the workers with a row of their own. Of a larger fleet every nth worker is shown."""
HEAT_ROWS_MAX = 128
"""Bound on the workers in a heat map. Of a larger fleet every nth worker is shown, and the page says so."""
_NAMES = 96
"""Width of the workers' names, in pixels."""
_ROW, _ROLE = 30, 4


def fleet_plots(timeline: Timeline) -> list[str]:
    """Return the plots of a timeline's workers. Empty without workers."""
    lines = list(timeline.workers.values())
    if not lines or timeline.start_s is None:
        return []
    borders = bins.edges(timeline.start_s, timeline.end_s, BINS)
    return [
        _queue_plot(lines, borders),
        _rows_plot(lines, borders),
        _heat_plot("Running requests per worker", lines, borders, _running, ("heat", "requests")),
        _heat_plot("Prompt tokens queued per worker", lines, borders, _queued, ("heat2", "tokens")),
    ]


def _running(line: WorkerLine) -> Sequence[int]:
    return line.running


def _queued(line: WorkerLine) -> Sequence[int]:
    return line.queued_tokens


def _means(line: WorkerLine, values: Sequence[int], borders: Values) -> Values:
    return bins.step_means(line.times_s, values, borders)


def _queue_plot(lines: Sequence[WorkerLine], borders: Values) -> str:
    """Return the plot of running and waiting requests, summed over all workers."""
    running = np.sum([_means(line, line.running, borders) for line in lines], axis=0)
    waiting = np.sum([_means(line, line.waiting, borders) for line in lines], axis=0)
    times_s = (borders - borders[0]).tolist()
    frame = Frame(times_s[-1], max(float(running.max()), float(waiting.max()), 1.0) * 1.05, width=svg.WIDE)
    content = frame.axes("s", "requests")
    content += svg.steps(frame, times_s, running.tolist(), "a") + svg.steps(frame, times_s, waiting.tolist(), "b")
    key = '<i class="a">running</i>, <i class="b">waiting</i>, as the workers reported'
    return plot("All workers", svg.svg(frame, content, "running and waiting requests"), key, wide=True)


def _rows_plot(lines: Sequence[WorkerLine], borders: Values) -> str:
    """Return the plot with a row per worker: its role as a band, and its running and waiting requests above it."""
    every = -(-len(lines) // LINES_MAX)
    shown = lines[::every]
    values = [(_means(line, line.running, borders), _means(line, line.waiting, borders)) for line in shown]
    most = max(max(float(running.max()), float(waiting.max())) for running, waiting in values) or 1.0
    height = len(shown) * _ROW + 40
    start_s = float(borders[0])
    frame = Frame(float(borders[-1]) - start_s, 1.0, left=_NAMES, height=height, width=svg.WIDE)
    content = ""
    for index, (line, (running, waiting)) in enumerate(zip(shown, values, strict=True)):
        floor = 8 + (index + 1) * _ROW
        content += f'<text x="{_NAMES - 6}" y="{floor - 8}" text-anchor="end">{_short_name(line.worker)}</text>'
        content += _roles(line, frame, start_s, float(borders[-1]), floor)
        content += _area_curve(running, borders, frame, (floor, most), "a") + _area_curve(
            waiting, borders, frame, (floor, most), "b"
        )
    content += _time_axis(frame)
    key = (
        'band: <i class="b">prefill</i>, <i class="a">decode</i>, <i class="c">mixed</i>, nothing while it is dead. '
        f'Above: <i class="a">running</i> and <i class="b">waiting</i> requests, the full height is {most:.3g}'
    )
    more = f"; one of every {every} workers" if every > 1 else ""
    return plot("Roles and queues", svg.svg(frame, content, "roles and queues per worker"), key + more, wide=True)


def _roles(line: WorkerLine, frame: Frame, start_s: float, end_s: float, floor: int) -> str:
    content = ""
    for span in line.roles:
        until_s = (end_s if span.end_s is None else span.end_s) - start_s
        box = (frame.x(span.start_s - start_s), frame.x(until_s), floor - _ROLE, _ROLE)
        words = f"{line.worker}: {span.role} from {span.start_s - start_s:.4g} to {until_s:.4g} s"
        content += svg.rectangle(box, span.role, f"{words}, because {span.reason}" if span.reason else words)
    return content


def _area_curve(values: Values, borders: Values, frame: Frame, place: tuple[int, float], kind: str) -> str:
    """Return a curve over a filled area. `place`: y of the row's lower edge in pixels, and the value at full height."""
    floor, most = place
    room = _ROW - _ROLE - 6
    points: list[str] = []
    for left, right, value in zip(borders[:-1], borders[1:], values, strict=True):
        y = round(floor - _ROLE - room * float(value) / most, 1)
        points += [f"{frame.x(float(left - borders[0]))},{y}", f"{frame.x(float(right - borders[0]))},{y}"]
    base = floor - _ROLE
    area = f"{frame.x(0)},{base} {' '.join(points)} {frame.x(frame.x_max)},{base}"
    return f'<polygon class="area {kind}" points="{area}"/><polyline class="curve {kind}" points="{" ".join(points)}"/>'


def _heat_plot(
    title: str,
    lines: Sequence[WorkerLine],
    borders: Values,
    of: Callable[[WorkerLine], Sequence[int]],
    look: tuple[str, str],
) -> str:
    """Return a heat map with a row per worker, darker for higher values. Empty if all are 0.

    `look`: color class and unit.
    """
    kind, unit = look
    every = -(-len(lines) // HEAT_ROWS_MAX)
    shown = lines[::every]
    values = [_means(line, of(line), borders) for line in shown]
    most = max(float(row.max()) for row in values)
    if most <= 0:
        return ""
    row_height = max(4, min(18, 640 // len(shown)))
    height = len(shown) * row_height + 34
    frame = Frame(float(borders[-1] - borders[0]), 1.0, left=_NAMES, height=height, width=svg.WIDE)
    content = ""
    for index, (line, row) in enumerate(zip(shown, values, strict=True)):
        if row_height >= 10:
            y = 4 + index * row_height + row_height * 0.7
            content += f'<text x="{_NAMES - 6}" y="{y:.1f}" text-anchor="end">{_short_name(line.worker)}</text>'
        content += _heat_row(line, row / most, 4 + index * row_height, row_height, (frame, kind, most))
    content += _time_axis(frame)
    sampled = f"; one of every {every} workers" if every > 1 else ""
    return plot(
        title, svg.svg(frame, content, title), f"the strongest color is {svg.short(most)} {unit}{sampled}", wide=True
    )


def _heat_row(line: WorkerLine, shades: Values, y: int, height: int, drawing: tuple[Frame, str, float]) -> str:
    """Return the cells of a row. Adjacent cells of equal shade become one rectangle."""
    frame, kind, most = drawing
    coarse = np.round(shades * 20) / 20
    changes = [0, *(np.flatnonzero(np.diff(coarse)) + 1).tolist(), len(coarse)]
    bin_s = frame.x_max / len(coarse)
    content = ""
    for begin, end in pairwise(changes):
        shade = float(coarse[begin])
        if shade > 0:
            words = f"{line.worker}: about {shade * most:.3g} at {begin * bin_s:.4g} s"
            box = (frame.x(begin * bin_s), frame.x(end * bin_s), y, height - 1)
            content += svg.rectangle(box, kind, words, shade * 0.95)
    return content


def _time_axis(frame: Frame) -> str:
    floor = frame.height - 22
    parts = [f'<line class="axis" x1="{_NAMES}" x2="{frame.width - RIGHT}" y1="{floor}" y2="{floor}"/>']
    for value in svg.ticks(0.0, frame.x_max, 12):
        x = frame.x(value)
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{floor}" y2="{floor + 4}"/>')
        parts.append(f'<text x="{x}" y="{floor + 16}" text-anchor="middle">{svg.short(value)}</text>')
    parts.append(f'<text x="{LEFT // 2}" y="{floor + 16}">s</text>')
    return "".join(parts)


def _short_name(worker: str) -> str:
    return worker if len(worker) <= 15 else f"{worker[:6]}..{worker[-7:]}"
