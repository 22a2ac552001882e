"""Distributions of numbers that differ between requests: lengths, turns, think times. Tables of a workload file."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from random import Random

from msgspec import Struct

from baton.lab.workload.rows import TOKENS_MAX

CV_MAX = 1000.0
"""Largest accepted coefficient of variation: above it, nearly all values are 0."""


class _Kind(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of all distributions: `sample(draw)` draws a number, `problems()` returns the errors in the table."""


class Uniform(_Kind, frozen=True, tag="uniform"):
    low: float
    high: float

    def sample(self, draw: Random) -> float:
        return draw.uniform(self.low, self.high)

    def problems(self) -> list[str]:
        return _ordered(self.low, self.high) or _not_too_large("high", [self.high])


class LogNormal(_Kind, frozen=True, tag="lognormal"):
    """Most values are small, a few are very large, like the lengths of prompts and answers."""

    mean: float
    """Mean of the values before they are limited to `low` and `high`."""
    cv: float = 1.0
    """Standard deviation / mean."""
    low: float = 0.0
    high: float = math.inf

    def sample(self, draw: Random) -> float:
        variance = math.log1p(self.cv**2)
        value = draw.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
        return min(max(value, self.low), self.high)

    def problems(self) -> list[str]:
        return [*_above_zero("mean", self.mean), *_above_zero("cv", self.cv, CV_MAX), *_ordered(self.low, self.high)]


class Exponential(_Kind, frozen=True, tag="exponential"):
    mean: float
    low: float = 0.0
    high: float = math.inf

    def sample(self, draw: Random) -> float:
        return min(max(draw.expovariate(1 / self.mean), self.low), self.high)

    def problems(self) -> list[str]:
        return [*_above_zero("mean", self.mean), *_ordered(self.low, self.high)]


class Geometric(_Kind, frozen=True, tag="geometric"):
    """Whole numbers from 1 on, such as turns of a conversation that continues each time with equal probability."""

    mean: float
    """Mean of the numbers, at least 1."""

    def sample(self, draw: Random) -> float:
        if self.mean == 1:
            return 1.0
        return 1 + math.floor(math.log(1 - draw.random()) / math.log(1 - 1 / self.mean))

    def problems(self) -> list[str]:
        return [] if 1 <= self.mean <= TOKENS_MAX else [f"mean is {self.mean:g}, but must be from 1 to {TOKENS_MAX:,}"]


class WeightedValues(_Kind, frozen=True, tag="choices"):
    values: tuple[float, ...]
    weights: tuple[float, ...] = ()
    """Weights of the values. Empty: all are equally likely."""

    def sample(self, draw: Random) -> float:
        return draw.choices(self.values, self.weights or None)[0]

    def problems(self) -> list[str]:
        if not self.values or min(self.values) < 0:
            return ["values must be one number or more, none below 0"]
        if self.weights and (len(self.weights) != len(self.values) or min(self.weights) < 0 or not sum(self.weights)):
            return [f"{len(self.weights)} weights for {len(self.values)} values; give one of 0 or more for each"]
        return [*_not_too_large("a value", self.values), *_not_too_large("a weight", self.weights)]


class Percentiles(_Kind, frozen=True, tag="percentiles"):
    """A distribution given by percentiles. Between two points the logarithm is uniform, which suits long tails."""

    points: tuple[tuple[float, float], ...]
    """(percentile from 0 to 100, value), both ascending; the first percentile is 0 and the last is 100."""

    def sample(self, draw: Random) -> float:
        percentile = draw.random() * 100
        at = min(bisect_right(self.points, (percentile, math.inf)), len(self.points) - 1)
        (from_p, from_value), (to_p, to_value) = self.points[at - 1], self.points[at]
        share = (percentile - from_p) / (to_p - from_p)
        if from_value <= 0:
            return from_value + (to_value - from_value) * share
        return from_value * (to_value / from_value) ** share

    def problems(self) -> list[str]:
        percentiles = [percentile for percentile, _ in self.points]
        values = [value for _, value in self.points]
        whole = len(self.points) >= 2 and percentiles[0] == 0 and percentiles[-1] == 100
        if not whole or sorted(set(percentiles)) != percentiles:
            return ["points must be pairs [percentile, value] with percentiles that rise from 0 to 100"]
        if values != sorted(values) or values[0] < 0:
            return ["values of points must not fall, nor be below 0"]
        return _not_too_large("a value of the points", values)


Amount = float | Uniform | LogNormal | Exponential | Geometric | WeightedValues | Percentiles
"""A constant, or a distribution."""


def sample(amount: Amount, draw: Random) -> float:
    return amount if isinstance(amount, float | int) else amount.sample(draw)


def sample_count(amount: Amount, draw: Random) -> int:
    """Draw a whole number from 1 to `TOKENS_MAX`, which bounds distributions with an endless tail."""
    return max(1, round(min(sample(amount, draw), TOKENS_MAX)))


def amount_problems(where: str, amount: Amount) -> list[str]:
    if not isinstance(amount, float | int):
        return [f"{where}: {problem}" for problem in amount.problems()]
    return [] if 0 <= amount <= TOKENS_MAX else [f"{where} is {amount:g}, but must be from 0 to {TOKENS_MAX:,}"]


def _above_zero(name: str, value: float, most: float = TOKENS_MAX) -> list[str]:
    if 0 < value <= most:
        return []
    return [f"{name} is {value:g}, but must be above 0 and at most {most:,.0f}"]


def _not_too_large(name: str, values: Iterable[float]) -> list[str]:
    return [f"{name} is {value:g}, but must be at most {TOKENS_MAX:,}" for value in values if not value <= TOKENS_MAX]


def _ordered(low: float, high: float) -> list[str]:
    if 0 <= low <= high:
        return _not_too_large("low", [low])
    return [f"low is {low:g} and high is {high:g}, but low must be from 0 to high"]
