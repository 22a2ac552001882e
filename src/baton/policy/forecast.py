"""Forecast: what load will come, from the load that came. Roles and scaling look ahead with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from msgspec import Struct

from baton.core.types import LoadWindow

DAY_S = 86_400.0


class Demand(Struct, frozen=True, kw_only=True):
    """Load as rates. All 0 where nothing came."""

    requests_rps: float = 0.0
    prompt_tokens: float = 0.0
    """Mean of a request."""
    output_tokens: float = 0.0
    """Mean of a request that finished."""


@runtime_checkable
class ForecastPolicy(Protocol):
    def ahead(self, history: Sequence[LoadWindow], horizon_s: float) -> Demand:
        """Predict the load `horizon_s` after the end of the last window. `history` is never empty."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentDemand:
    """What comes is what came in the last while. The lengths of answers are those that finished last."""

    span_s: float = 30.0
    """How far back it looks."""

    def ahead(self, history: Sequence[LoadWindow], horizon_s: float) -> Demand:
        """See `ForecastPolicy.ahead`."""
        return demand_of(since(history, history[-1].end_s - self.span_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeOfDay:
    """What comes is what came at that time on earlier days, scaled by how this day compares with them so far.

    With less than a day of history it is what came last.
    """

    span_s: float = 900.0
    """Width of the time of day that is looked at."""

    def ahead(self, history: Sequence[LoadWindow], horizon_s: float) -> Demand:
        """See `ForecastPolicy.ahead`."""
        now_s = history[-1].end_s
        recent = demand_of(since(history, now_s - self.span_s))
        then = self._around(history, now_s + horizon_s)
        same = self._around(history, now_s)
        if not then or not same:
            return recent
        usual, expected = demand_of(same), demand_of(then)
        scale = recent.requests_rps / usual.requests_rps if usual.requests_rps else 1.0
        return Demand(
            requests_rps=expected.requests_rps * scale,
            prompt_tokens=expected.prompt_tokens,
            output_tokens=expected.output_tokens,
        )

    def _around(self, history: Sequence[LoadWindow], at_s: float) -> list[LoadWindow]:
        """Take the windows of earlier days near a time of day."""
        oldest_s, newest_s = history[0].end_s - history[0].window_s, history[-1].end_s
        return [
            window
            for window in history
            if newest_s - window.end_s >= DAY_S / 2 and _day_gap_s(window.end_s, at_s) <= self.span_s / 2
        ] if newest_s - oldest_s >= DAY_S / 2 else []  # fmt: skip


def since(history: Sequence[LoadWindow], from_s: float) -> list[LoadWindow]:
    """Take the windows that ended after a time, newest first; at least the last."""
    taken: list[LoadWindow] = []
    for window in reversed(history):
        if taken and window.end_s <= from_s:
            break
        taken.append(window)
    return taken


def demand_of(windows: Sequence[LoadWindow]) -> Demand:
    """Reduce windows to rates."""
    span_s = sum(window.window_s for window in windows)
    arrived = sum(window.arrived_requests for window in windows)
    finished = sum(window.finished_requests for window in windows)
    return Demand(
        requests_rps=arrived / span_s if span_s else 0.0,
        prompt_tokens=sum(window.arrived_tokens for window in windows) / arrived if arrived else 0.0,
        output_tokens=sum(window.output_tokens for window in windows) / finished if finished else 0.0,
    )


def _day_gap_s(one_s: float, other_s: float) -> float:
    gap_s = abs(one_s - other_s) % DAY_S
    return min(gap_s, DAY_S - gap_s)
