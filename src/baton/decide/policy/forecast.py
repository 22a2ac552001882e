"""Forecast: what load will come, from the load that came. Roles and scaling look ahead with it."""

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
    """Load as rates. All 0 where nothing came."""

    requests_rps: float = 0.0
    prompt_tokens: float = 0.0
    """Mean of a request."""
    output_tokens: float = 0.0
    """Mean of a request that finished."""


@runtime_checkable
class ForecastPolicy(Protocol):
    def ahead(self, history: Sequence[LoadWindow], horizon_s: float) -> LoadRates:
        """Predict the load `horizon_s` after the end of the last window.

        `history` is never empty, and its windows end one after the other, the last one now. Old ones are longer.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentDemand:
    """What comes is what came in the last while. The lengths of answers are those that finished last."""

    span_s: float = 30.0
    """How far back it looks."""

    def ahead(self, history: Sequence[LoadWindow], horizon_s: float) -> LoadRates:
        """See `ForecastPolicy.ahead`."""
        return load_rates(since(history, history[-1].end_s - self.span_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeOfDay:
    """What comes is what came at that time on earlier days, scaled by how this day compares with them so far.

    With less than a day of history it is what came last.
    """

    span_s: float = 900.0
    """Width of the time of day that is looked at."""
    steady_requests: float = 20.0
    """Requests that are added to both when this day is compared with earlier ones: what few requests say is chance."""

    def ahead(self, history: Sequence[LoadWindow], horizon_s: float) -> LoadRates:
        """See `ForecastPolicy.ahead`."""
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
            output_tokens=expected.output_tokens,
        )


def _earlier(history: Sequence[LoadWindow], until_s: float, span_s: float) -> list[LoadWindow]:
    """Take the last `span_s` before a time of day, on earlier days: what is half a day ago or less is of this one."""
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
    """Cut a window to a span, as if what is counted in it had come evenly."""
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
        finished_requests=round(ratio * window.finished_requests),
        output_tokens=round(ratio * window.output_tokens),
    )


def since(history: Sequence[LoadWindow], from_s: float) -> list[LoadWindow]:
    """Take the windows that ended after a time, newest first; at least the last."""
    older = bisect_right(history, from_s, key=_END)
    return list(islice(reversed(history), max(1, len(history) - older)))


def load_rates(windows: Sequence[LoadWindow]) -> LoadRates:
    """Reduce windows to rates."""
    span_s, arrived, arrived_tokens, finished, output_tokens = 0.0, 0, 0, 0, 0
    for window in windows:
        span_s += window.window_s
        arrived += window.arrived_requests
        arrived_tokens += window.arrived_tokens
        finished += window.finished_requests
        output_tokens += window.output_tokens
    return LoadRates(
        requests_rps=arrived / span_s if span_s else 0.0,
        prompt_tokens=arrived_tokens / arrived if arrived else 0.0,
        output_tokens=output_tokens / finished if finished else 0.0,
    )
