"""Data of the plots of a page. `report.js` draws them with the plot module of the dashboard."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

from baton.core.messages import Outcome
from baton.core.types import Role

Color = Literal["--prefill", "--decode", "--mixed", "--other", "--bad", "--p50", "--p90", "--p99"]
"""A colour of the page's style. It differs between light and dark mode."""
Format = Literal["seconds", "share", "number", "rate"]
"""How values are written: `seconds` with a fitting unit, `share` in percent, `rate` per second."""
DASHED, DOTTED = (6, 4), (2, 2)


class Series(Struct, frozen=True, kw_only=True):
    """One curve."""

    label: str
    color: Color
    x: Sequence[float]
    """Ascending."""
    values: Sequence[float | None]
    """None: there is no value."""
    dash: Sequence[int] = ()
    width: float = 1.5
    is_dots: bool = False
    """Points without a line between them."""
    names: Sequence[str] | None = None
    """A text for each point."""


class Mark(Struct, frozen=True):
    """A vertical dashed line."""

    at: float
    label: str


class Curves(Struct, frozen=True, kw_only=True, tag_field="type", tag="curves"):
    """Curves over time, or over another value."""

    series: Sequence[Series]
    format: Format
    label: str = ""
    """Name of the vertical axis."""
    end_s: float | None = None
    """End of the time axis, which all plots over time share. None: the curves are not over time."""
    x_max: float = 0.0
    x_format: Format = "number"
    x_label: str = ""
    floor: float = 0.0
    """Least value at the top of the vertical axis."""
    limits: Sequence[float] = ()
    """Values with a dashed line across, such as an SLO."""
    marks: Sequence[Mark] = ()


class WorkerRow(Struct, frozen=True):
    """One worker. `busy`, `running` and `waiting` have a value for each bin."""

    name: str
    roles: Sequence[tuple[float, float, Role, str]]
    """Start, end, role, and the reason for it."""
    busy: Sequence[float]
    """Share of the bin with a running request."""
    running: Sequence[float]
    waiting: Sequence[float]


class WorkerLanes(Struct, frozen=True, kw_only=True, tag_field="type", tag="workers"):
    """A lane for each worker, with its role and its load."""

    end_s: float
    borders: Sequence[float]
    """Borders of the bins."""
    workers: Sequence[WorkerRow]
    row_height: int = 30


class HeatRow(Struct, frozen=True):
    name: str
    values: Sequence[float]
    """A value for each bin."""


class HeatLanes(Struct, frozen=True, kw_only=True, tag_field="type", tag="heat"):
    """A lane for each worker, the darker, the higher its value."""

    end_s: float
    borders: Sequence[float]
    rows: Sequence[HeatRow]
    most: float
    """The highest value."""
    color: Color
    unit: str
    row_height: float


class RequestLanes(Struct, frozen=True, kw_only=True, tag_field="type", tag="requests"):
    """A lane for each request: its arrival, first token, end, outcome and output tokens."""

    end_s: float
    requests: Sequence[tuple[float, float | None, float, Outcome, int]]
    row_height: float


Drawing = Curves | WorkerLanes | HeatLanes | RequestLanes


def short(value: float) -> float:
    """Return the value with six significant digits, which keeps a page small."""
    return float(f"{value:.6g}")


def rounded(values: Iterable[float]) -> list[float]:
    return [short(value) for value in values]


def known(values: Iterable[float]) -> list[float | None]:
    """Return the rounded values, and None for NaN."""
    return [None if math.isnan(value) else short(value) for value in values]
