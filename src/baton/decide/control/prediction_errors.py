"""Errors of recent predictions: compare what routing predicted for each request with what happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log, sqrt

from baton.core.messages import DecodeBegun, PrefillFinished, RequestFailed, RequestFinished
from baton.core.types import ErrorBar, PredictionErrors
from baton.decide.control.flight import Flight

_MEMORY = 0.98
"""Factor by which each new request reduces the weight of all earlier ones."""
_MEMORY_S = 60.0
"""Time in which the weight of a request falls to 1/e, so that a fleet that rejects many requests tries again."""
_DOUBT = 4.0
"""Number of requests at which the mean and the variance count half. They count less with fewer requests."""
_ERROR_LOG_MAX = 1.5
NO_ERRORS = PredictionErrors()
TTFT_MISSES_RATIO = 0.01
"""Share of the admitted requests that may miss the SLO of their TTFT. Above it the margin grows, below it the margin
shrinks. A queue that has become too long makes all requests behind it late, so that only few misses are allowed."""
TPOT_MISSES_RATIO = 0.1
"""The same for the TPOT. A step that is too long delays only the requests in it, and a lower share would reject more
requests than it prevents misses."""
_MISS_LOG = 0.12
"""A missed SLO adds this to the margin's logarithm; every request subtracts `misses_ratio` of it."""
_MARGIN_LOG_MAX = 0.7
_MARGIN_S = 10.0
"""Time in which the margin's logarithm falls to 1/e. Short, because misses of a burst predict little after it."""
_NEARNESS = 6
"""Power of predicted time / SLO that weighs a request: errors of fast requests say little about the limit."""
_GAPS_MIN = 3
"""Minimum gaps between tokens for an answer's TPOT to count: that of shorter ones depends on a single step."""


@dataclass(slots=True)
class _Errors:
    """Weighted sums of the errors of one latency."""

    misses_ratio: float
    """Share of the requests that may miss their SLO."""
    at_s: float = 0.0
    requests: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    margin_log: float = 0.0

    def note(self, actual_s: float, predicted_s: float, slo_s: float, now_s: float) -> None:
        """Add a request. It weighs more the closer its prediction is to its SLO, where an error changes decisions."""
        if not (predicted_s > 0 and actual_s > 0):
            return
        weight = min(1.0, predicted_s / slo_s) ** _NEARNESS
        faded = self._faded(now_s)
        kept = (1.0 - weight * (1.0 - _MEMORY)) * faded
        error_log = min(_ERROR_LOG_MAX, max(-_ERROR_LOG_MAX, log(actual_s / predicted_s)))
        self.margin_log *= self._faded(now_s, _MARGIN_S)
        if predicted_s <= slo_s:  # a miss that was predicted says nothing about the margin
            self.margin_log += _MISS_LOG * ((actual_s > slo_s) - self.misses_ratio)
            self.margin_log = min(_MARGIN_LOG_MAX, max(0.0, self.margin_log))
        self.at_s = now_s
        self.requests = kept * self.requests + weight
        self.total = kept * self.total + weight * error_log
        self.squares = kept * self.squares + weight * error_log**2

    def bar(self, now_s: float) -> ErrorBar:
        if not self.requests:
            return ErrorBar()
        requests = self._faded(now_s) * self.requests
        mean, trust = self.total / self.requests, requests / (requests + _DOUBT)
        variance = max(0.0, self.squares / self.requests - mean**2)
        margin_log = self._faded(now_s, _MARGIN_S) * self.margin_log
        return ErrorBar(trust * mean, sqrt(trust * variance), requests, margin_log)

    def _faded(self, now_s: float, memory_s: float = _MEMORY_S) -> float:
        return exp(min(0.0, self.at_s - now_s) / memory_s)


@dataclass(slots=True)
class PredictionMeter:
    """Compares the predictions for requests with their events. Only first attempts count."""

    _ttft: _Errors = field(default_factory=lambda: _Errors(TTFT_MISSES_RATIO))
    _tpot: _Errors = field(default_factory=lambda: _Errors(TPOT_MISSES_RATIO))

    def note(
        self, flight: Flight, event: PrefillFinished | DecodeBegun | RequestFinished | RequestFailed, now_s: float
    ) -> None:
        """Record the first token or the end of a request."""
        if isinstance(event, RequestFailed) or (isinstance(event, PrefillFinished) and flight.until == "prompt"):
            return
        predicted, slo = flight.predicted, flight.request.slo
        if predicted is None or slo is None or flight.attempt > 1:
            return
        if flight.first_token_s is None:
            flight.first_token_s = now_s
            self._ttft.note(now_s - flight.routed_at_s, predicted.ttft_s, slo.ttft_s, now_s)
        gaps = event.output_tokens - 1 if isinstance(event, RequestFinished) else 0
        if gaps >= _GAPS_MIN:
            self._tpot.note((now_s - flight.first_token_s) / gaps, predicted.tpot_s, slo.tpot_s, now_s)

    def errors(self, now_s: float) -> PredictionErrors:
        """Return the errors of recent predictions."""
        return PredictionErrors(self._ttft.bar(now_s), self._tpot.bar(now_s))
