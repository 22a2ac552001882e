"""Plots of workers: roles and queues over time, and heat maps of their load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np

from baton.core.types import Role
from baton.lab.report import bins
from baton.lab.report.bins import Values
from baton.lab.report.drawings import DASHED, Color, HeatLanes, HeatRow, WorkerLanes, WorkerRow, rounded
from baton.lab.report.page import plot, short_number
from baton.lab.report.run_plots import BINS, binned, over_time
from baton.lab.report.timeline import Timeline, WorkerLine

LINES_MAX = 48
"""Bound on the workers with a lane of their own. Of a larger fleet every nth worker is shown."""
HEAT_ROWS_MAX = 128
"""Bound on the workers in a heat map. Of a larger fleet every nth worker is shown, and the page says so."""
SHADES = 20
"""Number of different strengths of a colour."""


def fleet_plots(timeline: Timeline, start_s: float, end_s: float) -> list[str]:
    """Return the plots of a timeline's workers. Empty without workers.

    `start_s`, `end_s`: ends of the page's time axis, on the timeline's clock.
    """
    lines = list(timeline.workers.values())
    if not lines or timeline.start_s is None:
        return []
    borders = bins.edges(start_s, end_s, BINS)
    return [
        _queue_plot(lines, borders),
        _lanes_plot(lines, borders),
        _heat_plot("Running requests per worker", lines, borders, attrgetter("running"), ("--decode", "requests")),
        _heat_plot(
            "Prompt tokens queued per worker", lines, borders, attrgetter("queued_tokens"), ("--prefill", "tokens")
        ),
    ]


def _means(line: WorkerLine, values: Sequence[int], borders: Values) -> Values:
    return bins.step_means(line.times_s, values, borders)


def _queue_plot(lines: Sequence[WorkerLine], borders: Values) -> str:
    """Return the plot of running and waiting requests, summed over all workers."""
    running = np.sum([_means(line, line.running, borders) for line in lines], axis=0)
    waiting = np.sum([_means(line, line.waiting, borders) for line in lines], axis=0)
    times_s = borders - borders[0]
    series = [
        binned("running", "--decode", times_s, running),
        binned("waiting", "--prefill", times_s, waiting, DASHED),
    ]
    return plot("All workers", over_time(series, "number", times_s), "requests, as the workers reported", wide=True)


def _lanes_plot(lines: Sequence[WorkerLine], borders: Values) -> str:
    """Return the plot with a lane per worker: its role as a band, and its running requests as a line."""
    every = -(-len(lines) // LINES_MAX)
    rows = [_worker_row(line, borders) for line in lines[::every]]
    times_s = borders - borders[0]
    drawing = WorkerLanes(end_s=float(times_s[-1]), borders=rounded(times_s.tolist()), workers=rows)
    note = "colour: role, strength: share of the time with running requests, line: running requests"
    more = f"; one of every {every} workers" if every > 1 else ""
    return plot("Workers over time", drawing, note + more, wide=True)


def _worker_row(line: WorkerLine, borders: Values) -> WorkerRow:
    start_s, end_s = float(borders[0]), float(borders[-1])
    roles: list[tuple[float, float, Role, str]] = [
        (span.start_s - start_s, (end_s if span.end_s is None else span.end_s) - start_s, span.role, span.reason)
        for span in line.roles
    ]
    busy = _means(line, [min(1, running) for running in line.running], borders)
    return WorkerRow(
        name=line.worker,
        roles=roles,
        busy=(np.round(busy * SHADES) / SHADES).tolist(),
        running=rounded(_means(line, line.running, borders).tolist()),
        waiting=rounded(_means(line, line.waiting, borders).tolist()),
    )


def _heat_plot(
    title: str,
    lines: Sequence[WorkerLine],
    borders: Values,
    of: Callable[[WorkerLine], Sequence[int]],
    look: tuple[Color, str],
) -> str:
    """Return a heat map with a lane per worker, darker for higher values. Empty if all are 0.

    `look`: color and unit.
    """
    color, unit = look
    every = -(-len(lines) // HEAT_ROWS_MAX)
    values = [_means(line, of(line), borders) for line in lines[::every]]
    most = max(float(row.max()) for row in values)
    if most <= 0:
        return ""
    times_s = borders - borders[0]
    rows = [HeatRow(line.worker, rounded(row.tolist())) for line, row in zip(lines[::every], values, strict=True)]
    drawing = HeatLanes(
        end_s=float(times_s[-1]),
        borders=rounded(times_s.tolist()),
        rows=rows,
        most=most,
        color=color,
        unit=unit,
        row_height=max(4.0, min(18.0, 640 / len(rows))),
    )
    sampled = f"; one of every {every} workers" if every > 1 else ""
    return plot(title, drawing, f"the strongest color is {short_number(most)} {unit}{sampled}", wide=True)
