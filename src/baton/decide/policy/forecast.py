"""Forecast: predict the coming load from the load history, for roles and scaling."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Protocol, runtime_checkable

from msgspec import Struct

from baton.core.types import LoadWindow

DAY_S = 86_400.0
_END = attrgetter("end_s")


class LoadRates(Struct, frozen=True, kw_only=True):
    """Load as rates and mean lengths. All 0 if no request arrived."""

    requests_rps: float = 0.0
    prompt_tokens: float = 0.0
    """Mean per request."""
    cached_tokens: float = 0.0
    """Mean of the prompt tokens that need no computation, per request."""
    output_tokens: float = 0.0
    """Mean per finished request."""


@runtime_checkable
class ForecastPolicy(Protocol):
    def ahead(self, history: Sequence[LoadWindow], horizon_s: float) -> LoadRates:
        """Predict the load `horizon_s` after the end of the last window.

        `history` is never empty and sorted by time; the last window ends now. Old windows are longer.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentDemand:
    """Predict that the load of the last `span_s` continues."""

    span_s: float = 30.0
    """Length of the history that is averaged."""

    def ahead(self, history: Sequence[LoadWindow], horizon_s: float) -> LoadRates:
        return load_rates(since(history, history[-1].end_s - self.span_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeOfDay:
    """Predict the load of the same time on earlier days, scaled by the ratio of today's load to theirs.

    With less than a day of history, it predicts the recent load.
    """

    span_s: float = 900.0
    """Width of the window around the time of day."""
    steady_requests: float = 20.0
    """Smoothing: requests added to both sides of the ratio, so that few requests do not produce extreme ratios."""

    def ahead(self, history: Sequence[LoadWindow], horizon_s: float) -> LoadRates:
        now_s = history[-1].end_s
        recent = load_rates(since(history, now_s - self.span_s))
        then = _earlier(history, now_s + horizon_s + self.span_s / 2, self.span_s)
        same = _earlier(history, now_s, self.span_s)
        if not then or not same:
            return recent
        usual, expected = load_rates(same), load_rates(then)
        steady_rps = self.steady_requests / self.span_s
        scale = (recent.requests_rps + steady_rps) / (usual.requests_rps + steady_rps)
        return LoadRates(
            requests_rps=expected.requests_rps * scale,
            prompt_tokens=expected.prompt_tokens,
            cached_tokens=expected.cached_tokens,
            output_tokens=expected.output_tokens,
        )


def _earlier(history: Sequence[LoadWindow], until_s: float, span_s: float) -> list[LoadWindow]:
    """Return the windows of the last `span_s` before a time of day, on earlier days (more than half a day ago)."""
    taken: list[LoadWindow] = []
    newest_s = history[-1].end_s - DAY_S / 2
    while until_s > history[0].end_s - history[0].window_s:
        from_s, to_s = until_s - span_s, min(until_s, newest_s)
        if from_s < to_s:
            first, last = bisect_right(history, from_s, key=_END), bisect_left(history, to_s, key=_END)
            taken += [_part(window, from_s, to_s) for window in history[first : last + 1]]
        until_s -= DAY_S
    return taken


def _part(window: LoadWindow, from_s: float, to_s: float) -> LoadWindow:
    """Cut a window to a span, assuming that its counts are spread evenly over it."""
    start_s = window.end_s - window.window_s
    part_s = min(window.end_s, to_s) - max(start_s, from_s)
    if part_s >= window.window_s:
        return window
    ratio = max(0.0, part_s) / window.window_s
    return LoadWindow(
        end_s=min(window.end_s, to_s),
        window_s=ratio * window.window_s,
        arrived_requests=round(ratio * window.arrived_requests),
        arrived_tokens=round(ratio * window.arrived_tokens),
        begun_requests=round(ratio * window.begun_requests),
        cached_tokens=round(ratio * window.cached_tokens),
        finished_requests=round(ratio * window.finished_requests),
        output_tokens=round(ratio * window.output_tokens),
    )


def since(history: Sequence[LoadWindow], from_s: float) -> list[LoadWindow]:
    """Return the windows that ended after a time, newest first; at least the last one."""
    older = bisect_right(history, from_s, key=_END)
    return list(islice(reversed(history), max(1, len(history) - older)))


def load_rates(windows: Sequence[LoadWindow]) -> LoadRates:
    """Return the rates and mean lengths over these windows."""
    span_s, arrived, arrived_tokens, begun, cached_tokens, finished, output_tokens = 0.0, 0, 0, 0, 0, 0, 0
    for window in windows:
        span_s += window.window_s
        arrived += window.arrived_requests
        arrived_tokens += window.arrived_tokens
        begun += window.begun_requests
        cached_tokens += window.cached_tokens
        finished += window.finished_requests
        output_tokens += window.output_tokens
    prompt_tokens = arrived_tokens / arrived if arrived else 0.0
    return LoadRates(
        requests_rps=arrived / span_s if span_s else 0.0,
        prompt_tokens=prompt_tokens,
        cached_tokens=min(prompt_tokens, cached_tokens / begun) if begun else 0.0,
        output_tokens=output_tokens / finished if finished else 0.0,
    )
