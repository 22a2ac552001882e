"""Forecasts of the request rate as a time series, by models of statsmodels: the extra `baton[forecast]` brings it."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from baton.core.errors import ConfigError
from baton.core.types import LoadWindow
from baton.policy.forecast import Demand, demand_of, since

Fit = Callable[[list[float], int], list[float]]
_ARIMA, _HOLT = "statsmodels.tsa.arima.model", "statsmodels.tsa.holtwinters"
POINTS_MIN = 12
"""Points from which on a model is fitted; with fewer, what comes is what came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arima:
    """ARIMA of the request rate. Lengths are those of the last while."""

    order: tuple[int, int, int] = (2, 1, 1)
    bin_s: float = 60.0
    """Width of a point of the series."""
    points_max: int = 240
    """Points that the model is fitted to."""

    def __post_init__(self) -> None:
        _statsmodels(_ARIMA)

    def ahead(self, history: Sequence[LoadWindow], horizon_s: float) -> Demand:
        """See `ForecastPolicy.ahead`."""
        return _ahead(history, horizon_s, self.bin_s, self.points_max, self._fit)

    def _fit(self, rates: list[float], steps: int) -> list[float]:
        model: Any = _statsmodels(_ARIMA)
        return list(model.ARIMA(rates, order=tuple(self.order)).fit().forecast(steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialSmoothing:
    """Error, trend, seasonality (ETS) with an additive, damped trend. Lengths are those of the last while."""

    bin_s: float = 60.0
    """Width of a point of the series."""
    points_max: int = 240
    """Points that the model is fitted to."""

    def __post_init__(self) -> None:
        _statsmodels(_HOLT)

    def ahead(self, history: Sequence[LoadWindow], horizon_s: float) -> Demand:
        """See `ForecastPolicy.ahead`."""
        return _ahead(history, horizon_s, self.bin_s, self.points_max, _fit_ets)


def _fit_ets(rates: list[float], steps: int) -> list[float]:
    model: Any = _statsmodels(_HOLT)
    return list(model.ExponentialSmoothing(rates, trend="add", damped_trend=True).fit().forecast(steps))


def _statsmodels(module: str) -> ModuleType:
    """Import a module of statsmodels. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError("this forecast needs statsmodels: pip install 'baton[forecast]'") from error


def _ahead(history: Sequence[LoadWindow], horizon_s: float, bin_s: float, points_max: int, fit: Fit) -> Demand:
    recent = demand_of(since(history, history[-1].end_s - bin_s))
    rates = binned_rps(history, bin_s)[-points_max:]
    if len(rates) < POINTS_MIN or max(rates) == min(rates):
        return recent
    steps = max(1, round(horizon_s / bin_s))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model that has not converged still forecasts
        values = fit(rates, steps)
    rate_rps = min(max(0.0, float(values[-1])), 4.0 * max(rates))
    return Demand(requests_rps=rate_rps, prompt_tokens=recent.prompt_tokens, output_tokens=recent.output_tokens)


def binned_rps(history: Sequence[LoadWindow], bin_s: float) -> list[float]:
    """Return the request rate of each full bin, oldest first; the last one ends with the history."""
    end_s, counts = history[-1].end_s, dict[int, int]()
    for window in history:
        place = int((end_s - window.end_s) // bin_s)
        counts[place] = counts.get(place, 0) + window.arrived_requests
    full = int((end_s - (history[0].end_s - history[0].window_s) + 1e-9) // bin_s)
    return [counts.get(place, 0) / bin_s for place in range(full - 1, -1, -1)]
