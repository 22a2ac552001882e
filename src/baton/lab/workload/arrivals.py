"""When requests arrive: processes without end, each a table of a workload file (docs/workloads.md) or made in code."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain, islice, repeat, tee
from random import Random

from msgspec import Struct, structs

SHAPE_MIN, SHAPE_MAX = 0.05, 100.0
"""Of a Weibull distribution: a coefficient of variation from 0.013 to about 1e5."""
_BOUNDS = {
    "rate_rps": (1e-9, 1e9),
    "cv": (0.001, 1000.0),
    "burst_ratio": (1e-6, 1e6),
    "burst_s": (0.001, 1e9),
    "calm_s": (0.001, 1e9),
    "peak_ratio": (1e-6, 1e6),
    "period_s": (0.001, 1e9),
    "start_s": (0.0, 1e9),
}
"""Least and most of every number of a process: far past what anybody means, and near enough to be computed with."""
_PIECES_PER_PERIOD = 96
"""A period of a diurnal rate is cut into as many pieces of constant rate: a day into quarters of an hour."""

Pieces = Iterable[tuple[float, float]]
"""(duration_s, rate_rps), one after another."""


class _Arrivals(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Every process below is one of these: `times_s(draw)` yields arrival times, ascending from 0 on, without end."""


class PoissonArrivals(_Arrivals, frozen=True, tag="poisson"):
    """Independent clients: exponential gaps."""

    rate_rps: float

    def times_s(self, draw: Random) -> Iterator[float]:
        return accumulate((draw.expovariate(self.rate_rps) for _ in repeat(None)), initial=0.0)


class GammaArrivals(_Arrivals, frozen=True, tag="gamma"):
    """Bursty (cv > 1) or regular (cv < 1) clients; cv = 1 is Poisson."""

    rate_rps: float
    cv: float
    """Standard deviation over mean of the gaps; above 0."""

    def times_s(self, draw: Random) -> Iterator[float]:
        return accumulate((gap / self.rate_rps for gap in gamma_gaps(self.cv, draw)), initial=0.0)


class WeibullArrivals(_Arrivals, frozen=True, tag="weibull"):
    """As Gamma, with a longer tail of gaps at the same cv."""

    rate_rps: float
    cv: float

    def times_s(self, draw: Random) -> Iterator[float]:
        return accumulate((gap / self.rate_rps for gap in weibull_gaps(self.cv, draw)), initial=0.0)


class ConstantArrivals(_Arrivals, frozen=True, tag="constant"):
    """A metronome."""

    rate_rps: float

    def times_s(self, draw: Random) -> Iterator[float]:
        return (index / self.rate_rps for index, _ in enumerate(repeat(None)))


class AllAtOnce(_Arrivals, frozen=True, tag="at-once"):
    """Everybody at the door: measures throughput, and how the server sheds load."""

    def times_s(self, draw: Random) -> Iterator[float]:
        return repeat(0.0)


class BurstyArrivals(_Arrivals, frozen=True, tag="bursty"):
    """Calm and storm by turns, each of random (exponential) length: a Markov-modulated Poisson process."""

    rate_rps: float
    """Mean over both."""
    burst_ratio: float = 5.0
    """Rate in a storm over the rate in a calm."""
    burst_s: float = 10.0
    calm_s: float = 50.0
    """Mean lengths."""

    def times_s(self, draw: Random) -> Iterator[float]:
        weight = (self.calm_s + self.burst_ratio * self.burst_s) / (self.calm_s + self.burst_s)
        calm_rps = self.rate_rps / weight
        turns = ((self.calm_s, calm_rps), (self.burst_s, calm_rps * self.burst_ratio))
        pieces = ((draw.expovariate(1 / mean_s), rate_rps) for _ in repeat(None) for mean_s, rate_rps in turns)
        return follow_rate(exponential_gaps(draw), pieces)


class DiurnalArrivals(_Arrivals, frozen=True, tag="diurnal"):
    """A rate that rises and falls as a sine over a day (or another period)."""

    rate_rps: float
    """Mean over a period."""
    peak_ratio: float = 3.0
    """Highest rate over lowest."""
    period_s: float = 86_400.0
    start_s: float = 0.0
    """Where in the period the workload begins: 0 is the lowest rate, half a period the highest."""
    cv: float = 1.0
    """Of the gaps beside the change of rate: 1 is Poisson."""

    def times_s(self, draw: Random) -> Iterator[float]:
        """Whole periods that pass until the next arrival are not gone through: in each, as many are expected."""
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
    """Draw `count` arrival times. The same `draw` state gives the same times."""
    return list(islice(arrivals.times_s(draw), count))


def arrivals_problems(where: str, arrivals: Arrivals) -> list[str]:
    """What is wrong with the numbers of a process."""
    numbers: dict[str, float] = structs.asdict(arrivals)
    return [
        f"{where}.{name} is {value:g}, but must be from {low:g} to {high:g}"
        for name, value in numbers.items()
        for low, high in [_BOUNDS[name]]
        if not low <= value <= high
    ]


def scale_arrivals(arrivals: Arrivals, ratio: float) -> Arrivals:
    """The same process `ratio` times as often; what has no rate stays as it is."""
    match arrivals:
        case AllAtOnce():
            return arrivals
        case _:
            return structs.replace(arrivals, rate_rps=arrivals.rate_rps * ratio)


def follow_rate(gaps: Iterator[float], pieces: Pieces) -> Iterator[float]:
    """Stretch gaps of mean 1 so that arrivals follow a rate; ends with the pieces."""
    start_s = 0.0
    due = next(gaps)  # arrivals expected between the piece's start and the next arrival
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
    """Gaps of mean 1 with a coefficient of variation above 0."""
    shape = 1 / cv**2
    return (draw.gammavariate(shape, cv**2) for _ in repeat(None))


def weibull_gaps(cv: float, draw: Random) -> Iterator[float]:
    """Gaps of mean 1 with a coefficient of variation (within the bounds of `SHAPE_MIN` and `SHAPE_MAX`)."""
    shape = weibull_shape(cv)
    scale = 1 / math.gamma(1 + 1 / shape)
    return (draw.weibullvariate(scale, shape) for _ in repeat(None))


def weibull_shape(cv: float) -> float:
    """Find the shape whose coefficient of variation is `cv`; it falls as the shape grows, so halving finds it."""
    low, high = SHAPE_MIN, SHAPE_MAX
    for _ in range(60):
        middle = math.sqrt(low * high)
        spread = math.expm1(math.lgamma(1 + 2 / middle) - 2 * math.lgamma(1 + 1 / middle))
        low, high = (middle, high) if spread > cv**2 else (low, middle)
    return math.sqrt(low * high)


def fill_span(gaps: Iterator[float], count: int, span_s: float) -> list[float]:
    """`count` times from 0 on whose gaps, the one after the last included, fill the span exactly."""
    drawn = list(islice(gaps, count))
    total = sum(drawn)
    if total <= 0:  # all gaps too small for a float: a burst
        return [0.0] * count
    return [at * span_s / total for at in islice(chain((0.0,), accumulate(drawn)), count)]
