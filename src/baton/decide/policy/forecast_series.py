"""Time-series forecasts of the request rate with statsmodels (extra `baton[forecast]`)."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from baton.core.errors import ConfigError
from baton.core.types import LoadWindow
from baton.decide.policy.forecast import LoadRates, load_rates, since

Fit = Callable[[list[float], int], list[float]]
_ARIMA, _HOLT = "statsmodels.tsa.arima.model", "statsmodels.tsa.holtwinters"
POINTS_MIN = 12
"""Minimum number of points for a fit. With fewer, the recent load is the forecast."""


@dataclass(slots=True)
class _Latest:
    """Cache of the last forecast. A fit is slow, so it is repeated only when the series has a new point."""

    asked: tuple[int, int] = (-1, 0)
    """Key of the forecast: the current point of the series, and the number of points ahead."""
    rate_rps: float | None = None
    """None: the series had too few points or was constant."""


@dataclass(slots=True, kw_only=True)
class Arima:
    """ARIMA model of the request rate, fitted once per point. Lengths are the recent means."""

    order: tuple[int, int, int] = (2, 1, 1)
    bin_s: float = 60.0
    """Duration of one point of the series."""
    points_max: int = 240
    """Maximum number of points that the model is fitted to."""
    _latest: _Latest = field(default_factory=_Latest, init=False)

    def __post_init__(self) -> None:
        _optional(_ARIMA)

    def ahead(self, history: Sequence[LoadWindow], horizon_s: float) -> LoadRates:
        return _ahead(history, horizon_s, self, self._latest, self._fit)

    def _fit(self, rates: list[float], steps: int) -> list[float]:
        model: Any = _optional(_ARIMA)
        return list(model.ARIMA(rates, order=tuple(self.order)).fit().forecast(steps))


@dataclass(slots=True, kw_only=True)
class ExponentialSmoothing:
    """Exponential smoothing (ETS) with an additive damped trend, fitted once per point. Lengths are recent means."""

    bin_s: float = 60.0
    """Duration of one point of the series."""
    points_max: int = 240
    """Maximum number of points that the model is fitted to."""
    _latest: _Latest = field(default_factory=_Latest, init=False)

    def __post_init__(self) -> None:
        _optional(_HOLT)

    def ahead(self, history: Sequence[LoadWindow], horizon_s: float) -> LoadRates:
        return _ahead(history, horizon_s, self, self._latest, _fit_ets)


def _fit_ets(rates: list[float], steps: int) -> list[float]:
    model: Any = _optional(_HOLT)
    return list(model.ExponentialSmoothing(rates, trend="add", damped_trend=True).fit().forecast(steps))


def _optional(module: str) -> ModuleType:
    """Import a module of the extra. Raise ConfigError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(f"this forecast needs {package}: pip install 'baton[forecast]'") from error


def _ahead(
    history: Sequence[LoadWindow],
    horizon_s: float,
    series: Arima | ExponentialSmoothing,
    latest: _Latest,
    fit: Fit,
) -> LoadRates:
    now_s = history[-1].end_s
    recent = load_rates(since(history, now_s - series.bin_s))
    asked = int(now_s // series.bin_s), max(1, round(horizon_s / series.bin_s))
    if asked != latest.asked:
        rates = binned_rps(history, series.bin_s, series.points_max)
        is_unfit = len(rates) < POINTS_MIN or max(rates) == min(rates)
        latest.asked, latest.rate_rps = asked, None if is_unfit else _forecast_rps(rates, asked[1], fit)
    if latest.rate_rps is None:
        return recent
    return LoadRates(
        requests_rps=latest.rate_rps,
        prompt_tokens=recent.prompt_tokens,
        cached_tokens=recent.cached_tokens,
        output_tokens=recent.output_tokens,
    )


def _forecast_rps(rates: list[float], steps: int, fit: Fit) -> float:
    threads: Any = _optional("threadpoolctl")
    with warnings.catch_warnings(), threads.threadpool_limits(1, user_api="blas"):  # threads slow small matrices down
        warnings.simplefilter("ignore")  # a model that has not converged still forecasts
        values = fit(rates, steps)
    return min(max(0.0, float(values[-1])), 4.0 * max(rates))


def binned_rps(history: Sequence[LoadWindow], bin_s: float, bins_max: int) -> list[float]:
    """Return the request rate of the last full bins, oldest first; the last one ends with the history.

    A window that overlaps several bins is divided by time: old windows may be longer than a bin.
    """
    end_s = history[-1].end_s
    full = int((end_s - (history[0].end_s - history[0].window_s) + 1e-9) // bin_s)
    counts = [0.0] * min(full, bins_max)
    for window in reversed(history):
        newest_s = end_s - window.end_s
        if newest_s >= len(counts) * bin_s:
            break
        _share_out(counts, window.arrived_requests, newest_s, newest_s + window.window_s, bin_s)
    return [count / bin_s for count in reversed(counts)]


def _share_out(counts: list[float], requests: int, newest_s: float, oldest_s: float, bin_s: float) -> None:
    """Add requests, evenly spread over a span in seconds before the end, to the bins. `counts[0]` is the newest bin."""
    place, span_s = int(newest_s // bin_s), oldest_s - newest_s
    while newest_s < oldest_s and place < len(counts):
        border_s = min(oldest_s, (place + 1) * bin_s)
        counts[place] += requests * (border_s - newest_s) / span_s
        newest_s, place = border_s, place + 1
