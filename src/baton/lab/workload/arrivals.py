"""Arrival processes: endless sequences of arrival times. Each is a table of a workload file (docs/workloads.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain, islice, repeat, tee
from random import Random
from typing import Annotated

from msgspec import Struct, structs

from baton.core.validation import Range

SHAPE_MIN, SHAPE_MAX = 0.05, 100.0
"""Range of a Weibull distribution's shape: coefficients of variation from 0.013 to about 1e5."""
Rate = Annotated[float, Range(least=1e-9, most=1e9)]
Variation = Annotated[float, Range(least=0.001, most=1000.0)]
Multiple = Annotated[float, Range(least=1e-6, most=1e6)]
Span = Annotated[float, Range(least=0.001, most=1e9)]
"""A duration in seconds. Its limits are wider than any real workload needs, and exact enough in floats."""
_PIECES_PER_PERIOD = 96
"""A diurnal period is divided into this many pieces of constant rate: 15 minutes each for a day."""

Pieces = Iterable[tuple[float, float]]
"""(duration_s, rate_rps) of consecutive pieces of time."""


class _Arrivals(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of all processes. Their `times_s(draw)` yields ascending arrival times from 0 on, without end."""


class PoissonArrivals(_Arrivals, frozen=True, tag="poisson"):
    """Independent clients: the gaps are exponential."""

    rate_rps: Rate

    def times_s(self, draw: Random) -> Iterator[float]:
        return accumulate((draw.expovariate(self.rate_rps) for _ in repeat(None)), initial=0.0)


class GammaArrivals(_Arrivals, frozen=True, tag="gamma"):
    """Bursty (cv > 1) or regular (cv < 1) clients; cv = 1 is Poisson."""

    rate_rps: Rate
    cv: Variation
    """Coefficient of variation of the gaps: standard deviation / mean."""

    def times_s(self, draw: Random) -> Iterator[float]:
        return accumulate((gap / self.rate_rps for gap in gamma_gaps(self.cv, draw)), initial=0.0)


class WeibullArrivals(_Arrivals, frozen=True, tag="weibull"):
    """Like Gamma, with a longer tail of gaps at the same cv."""

    rate_rps: Rate
    cv: Variation

    def times_s(self, draw: Random) -> Iterator[float]:
        return accumulate((gap / self.rate_rps for gap in weibull_gaps(self.cv, draw)), initial=0.0)


class ConstantArrivals(_Arrivals, frozen=True, tag="constant"):
    """Equal gaps."""

    rate_rps: Rate

    def times_s(self, draw: Random) -> Iterator[float]:
        return (index / self.rate_rps for index, _ in enumerate(repeat(None)))


class AllAtOnce(_Arrivals, frozen=True, tag="at-once"):
    """All requests arrive at time 0: measures throughput, and how the server sheds load."""

    def times_s(self, draw: Random) -> Iterator[float]:
        return repeat(0.0)


class BurstyArrivals(_Arrivals, frozen=True, tag="bursty"):
    """Calm and burst phases of exponential length alternate: a Markov-modulated Poisson process."""

    rate_rps: Rate
    """Mean over both phases."""
    burst_ratio: Multiple = 5.0
    """Rate in a burst / rate in a calm phase."""
    burst_s: Span = 10.0
    calm_s: Span = 50.0
    """Mean lengths of the phases."""

    def times_s(self, draw: Random) -> Iterator[float]:
        weight = (self.calm_s + self.burst_ratio * self.burst_s) / (self.calm_s + self.burst_s)
        calm_rps = self.rate_rps / weight
        turns = ((self.calm_s, calm_rps), (self.burst_s, calm_rps * self.burst_ratio))
        pieces = ((draw.expovariate(1 / mean_s), rate_rps) for _ in repeat(None) for mean_s, rate_rps in turns)
        return follow_rate(exponential_gaps(draw), pieces)


class DiurnalArrivals(_Arrivals, frozen=True, tag="diurnal"):
    """The rate follows a sine over a day (or another period)."""

    rate_rps: Rate
    """Mean over a period."""
    peak_ratio: Multiple = 3.0
    """Highest rate / lowest rate."""
    period_s: Span = 86_400.0
    start_s: Annotated[float, Range(least=0.0, most=1e9)] = 0.0
    """Position in the period at which the workload begins: 0 is the lowest rate, half a period the highest."""
    cv: Variation = 1.0
    """Coefficient of variation of the gaps, apart from the change of rate. 1 is Poisson."""

    def times_s(self, draw: Random) -> Iterator[float]:
        # Each period expects the same number of arrivals, so a gap skips its whole periods at once.
        gaps = exponential_gaps(draw) if self.cv == 1 else gamma_gaps(self.cv, draw)
        gone, going = tee(divmod(gap, self.rate_rps * self.period_s) for gap in gaps)
        within_s = follow_rate((rest for _, rest in going), self._pieces())
        periods = accumulate(periods for periods, _ in gone)
        return (at_s + count * self.period_s for at_s, count in zip(within_s, periods, strict=False))

    def _pieces(self) -> Iterator[tuple[float, float]]:
        swing = (self.peak_ratio - 1) / (self.peak_ratio + 1)
        piece_s = self.period_s / _PIECES_PER_PERIOD
        for index, _ in enumerate(repeat(None)):
            phase = (self.start_s + (index + 0.5) * piece_s) / self.period_s
            yield piece_s, self.rate_rps * (1 - swing * math.cos(2 * math.pi * phase))


Arrivals = (
    PoissonArrivals | GammaArrivals | WeibullArrivals | ConstantArrivals | AllAtOnce | BurstyArrivals | DiurnalArrivals
)


def draw_times_s(arrivals: Arrivals, count: int, draw: Random) -> list[float]:
    """Draw `count` arrival times. Equal states of `draw` give equal times."""
    return list(islice(arrivals.times_s(draw), count))


def scale_arrivals(arrivals: Arrivals, ratio: float) -> Arrivals:
    """Return the process with its rate multiplied by `ratio`. `AllAtOnce` has no rate and stays unchanged."""
    if isinstance(arrivals, AllAtOnce):
        return arrivals
    return structs.replace(arrivals, rate_rps=arrivals.rate_rps * ratio)


def follow_rate(gaps: Iterator[float], pieces: Pieces) -> Iterator[float]:
    """Yield arrival times that follow the rate of `pieces`, from gaps of mean 1. Ends with the pieces."""
    start_s = 0.0
    due = next(gaps)  # expected number of arrivals from the piece's start to the next arrival
    for duration_s, rate_rps in pieces:
        expected = duration_s * rate_rps
        while rate_rps > 0 and due <= expected:
            yield start_s + due / rate_rps
            due += next(gaps)
        due -= expected
        start_s += duration_s


def exponential_gaps(draw: Random) -> Iterator[float]:
    return (draw.expovariate(1.0) for _ in repeat(None))


def gamma_gaps(cv: float, draw: Random) -> Iterator[float]:
    """Yield gaps of mean 1 with the given coefficient of variation, which is above 0."""
    shape = 1 / cv**2
    return (draw.gammavariate(shape, cv**2) for _ in repeat(None))


def weibull_gaps(cv: float, draw: Random) -> Iterator[float]:
    """Yield gaps of mean 1 with the given coefficient of variation, as far as `SHAPE_MIN` and `SHAPE_MAX` allow."""
    shape = weibull_shape(cv)
    scale = 1 / math.gamma(1 + 1 / shape)
    return (draw.weibullvariate(scale, shape) for _ in repeat(None))


def weibull_shape(cv: float) -> float:
    """Return the shape whose coefficient of variation is `cv`. Bisection works: cv falls as the shape grows."""
    low, high = SHAPE_MIN, SHAPE_MAX
    for _ in range(60):
        middle = math.sqrt(low * high)
        spread = math.expm1(math.lgamma(1 + 2 / middle) - 2 * math.lgamma(1 + 1 / middle))
        low, high = (middle, high) if spread > cv**2 else (low, middle)
    return math.sqrt(low * high)


def fill_span(gaps: Iterator[float], count: int, span_s: float) -> list[float]:
    """Return `count` times from 0 on. Their gaps, including the one after the last time, add up to the span."""
    drawn = list(islice(gaps, count))
    total = sum(drawn)
    if total <= 0:  # all gaps are below the smallest float
        return [0.0] * count
    return [at * span_s / total for at in islice(chain((0.0,), accumulate(drawn)), count)]
