"""Draw requests from ServeGen's statistics: each client has its own rate, bursts and lengths in each time window.

Source: Xiang et al., "ServeGen: Workload Characterization and Generation of Large Language Model Serving in
Production", 2025, and the statistics of its repository (alibaba/ServeGen).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import msgspec
from msgspec import Struct

from baton.lab.workload.amounts import Percentiles, sample_count
from baton.lab.workload.arrivals import fill_span, gamma_gaps, weibull_gaps
from baton.lab.workload.request import TraceRequest
from baton.lab.workload.rows import Fields, Positive, Time, read_row

WINDOW_S = 600.0
"""Length of a window of the arrival statistics."""
LENGTH_WINDOW_S = 21_600.0
"""Length of a window of the length statistics: 6 h."""
PERCENTILES = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)


class ArrivalRow(Struct, frozen=True):
    """Arrivals of one client in one window of 600 s. `cv` describes the gaps. Empty windows have no row."""

    client: str
    t_s: Time
    rate_rps: Positive
    cv: Positive
    pattern: Literal["Gamma", "Weibull"]
    param1: Positive
    """Shape of the gaps."""
    param2: Positive
    """Scale of the gaps, in seconds."""

    @property
    def requests(self) -> int:
        return round(self.rate_rps * WINDOW_S)

    @property
    def active_s(self) -> float:
        """Return the time from the window's first request to its last: requests times their mean gap."""
        mean = self.param1 if self.pattern == "Gamma" else math.gamma(1 + 1 / self.param1)
        return min(WINDOW_S, self.requests * mean * self.param2)


@dataclass(frozen=True, slots=True)
class LengthRow:
    """Length statistics of one client in one window of 6 h."""

    client: str
    t_s: float
    input_tokens: Percentiles
    output_tokens: Percentiles


def read_length_row(fields: Fields) -> LengthRow:
    """Read one row. Raises ValueError if a column is missing or not a number, or if percentiles decrease."""
    start = read_row(fields, _LengthStart)
    return LengthRow(start.client, start.t_s, _percentiles(fields, "in"), _percentiles(fields, "out"))


class _LengthStart(Struct):
    client: str
    t_s: Time


def _percentiles(fields: Fields, which: str) -> Percentiles:
    names = [f"{which}_p{percentile}" for percentile in PERCENTILES]
    missing = [name for name in names if name not in fields]
    if missing:
        raise ValueError(f"no column {', '.join(missing)}")
    try:
        values = msgspec.convert([fields[name] for name in names], list[float], strict=False)
    except msgspec.ValidationError as error:
        shown = ", ".join(f"{name} {fields[name]}" for name in names)
        raise ValueError(f"percentiles must be numbers, and one of these is not: {shown}") from error
    found = Percentiles(tuple(zip(map(float, PERCENTILES), values, strict=True)))
    problems = found.problems()
    if problems:
        raise ValueError(f"{which}: {'; '.join(problems)}: {values}")
    return found


@dataclass(slots=True, kw_only=True)
class Statistics:
    """The rows of a model's two files."""

    arrivals: Sequence[ArrivalRow]
    lengths: Sequence[LengthRow]
    _lengths_of: dict[str, dict[int, LengthRow]] = field(default_factory=dict[str, dict[int, LengthRow]])

    def __post_init__(self) -> None:
        for row in self.lengths:
            self._lengths_of.setdefault(row.client, {})[int(row.t_s // LENGTH_WINDOW_S)] = row

    def requests(
        self, *, start_s: float, duration_s: float | None, rate_scale: float, seed: int
    ) -> Iterator[TraceRequest]:
        """Yield requests in order of time; `start_s` becomes time 0. The tenant is the client.

        Each window of a client has its logged number of requests times `rate_scale`, rounded up or down at random.
        """
        end_s = math.inf if duration_s is None else start_s + duration_s
        windows: dict[str, list[ArrivalRow]] = {}
        for row in self.arrivals:
            if row.t_s + WINDOW_S > start_s and row.t_s < end_s:
                windows.setdefault(row.client, []).append(row)
        streams = [
            self._client(client, rows, rate_scale, Random(f"servegen {seed} {client}"))
            for client, rows in windows.items()
        ]
        for request in heapq.merge(*streams, key=lambda request: request.at_s):
            if start_s <= request.at_s < end_s:
                yield msgspec.structs.replace(request, at_s=request.at_s - start_s)

    def _client(
        self, client: str, rows: Sequence[ArrivalRow], rate_scale: float, draw: Random
    ) -> Iterator[TraceRequest]:
        known = self._lengths_of.get(client) or self._lengths_of[draw.choice(sorted(self._lengths_of))]
        for row in sorted(rows, key=lambda row: row.t_s):
            lengths = _nearest(known, int(row.t_s // LENGTH_WINDOW_S))
            for at_s in window_times_s(row, rate_scale, draw):
                yield TraceRequest(
                    at_s=at_s,
                    input_tokens=sample_count(lengths.input_tokens, draw),
                    output_tokens=sample_count(lengths.output_tokens, draw),
                    tenant=client,
                )


def window_times_s(row: ArrivalRow, rate_scale: float, draw: Random) -> list[float]:
    """Draw one client's arrivals in one window. The active part starts at a random time within the window."""
    wanted = row.requests * rate_scale
    count = math.floor(wanted) + (draw.random() < wanted % 1)
    gaps = gamma_gaps(row.cv, draw) if row.pattern == "Gamma" else weibull_gaps(row.cv, draw)
    begin_s = row.t_s + draw.uniform(0.0, WINDOW_S - row.active_s)
    return [begin_s + at_s for at_s in fill_span(gaps, count, row.active_s)]


def _nearest(rows: Mapping[int, LengthRow], window: int) -> LengthRow:
    """Return the lengths of the window, or of the nearest window that has any."""
    return rows[min(rows, key=lambda known: (abs(known - window), known))]
