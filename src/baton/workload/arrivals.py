"""When requests arrive. Times count from the first request, which arrives at 0."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Protocol


class Arrivals(Protocol):
    """A process of arrivals."""

    def times_s(self, count: int, draw: Random) -> list[float]:
        """Draw `count` arrival times, ascending, the first at 0. The same `draw` state gives the same times."""
        ...


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    """Independent clients: exponential gaps."""

    rate_rps: float

    def times_s(self, count: int, draw: Random) -> list[float]:
        return _times(draw.expovariate(self.rate_rps) for _ in range(count - 1)) if count else []


@dataclass(frozen=True, slots=True)
class GammaArrivals:
    """Bursty (cv > 1) or regular (cv < 1) clients; cv = 1 is Poisson."""

    rate_rps: float
    cv: float
    """Standard deviation over mean of the gaps; above 0."""

    def times_s(self, count: int, draw: Random) -> list[float]:
        shape = 1 / self.cv**2
        scale_s = 1 / (self.rate_rps * shape)
        return _times(draw.gammavariate(shape, scale_s) for _ in range(count - 1)) if count else []


@dataclass(frozen=True, slots=True)
class ConstantArrivals:
    """A metronome."""

    rate_rps: float

    def times_s(self, count: int, draw: Random) -> list[float]:
        return [index / self.rate_rps for index in range(count)]


@dataclass(frozen=True, slots=True)
class AllAtOnce:
    """Everybody at the door: measures throughput, and how the server sheds load."""

    def times_s(self, count: int, draw: Random) -> list[float]:
        return [0.0] * count


def _times(gaps_s: Iterable[float]) -> list[float]:
    return list(accumulate(gaps_s, initial=0.0))
