"""The workload of a plan: request rate, lengths, prefix hits and SLO."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from baton.core.types import Slo

Value = TypeVar("Value", int, float)
STRATA = 24
"""Maximum number of length classes of a trace. The screening queries the cost model for each class."""


@dataclass(frozen=True, slots=True)
class LengthClass:
    """Requests of similar length."""

    input_tokens: int
    output_tokens: int
    weight: float
    """Their share of all requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadDemand:
    """The workload, reduced to the numbers that the screening needs."""

    rate_rps: float | None
    """Wanted rate. None: as high as the hardware allows."""
    lengths: tuple[LengthClass, ...]
    cached_ratio: float
    """Expected share of prompt tokens that hit the prefix cache."""
    slo: Slo
    attainment_ratio: float
    """Share of the requests that must meet the SLO."""

    @property
    def input_tokens(self) -> float:
        """Mean prompt length."""
        return sum(each.weight * each.input_tokens for each in self.lengths)

    @property
    def output_tokens(self) -> float:
        """Mean output length."""
        return sum(each.weight * each.output_tokens for each in self.lengths)

    @property
    def context_tokens(self) -> float:
        """Mean context of a decoding request. Long outputs decode longer, so they weigh more."""
        whole = sum(
            each.weight * each.output_tokens * (each.input_tokens + each.output_tokens / 2) for each in self.lengths
        )
        return whole / self.output_tokens

    def new_tokens(self, each: LengthClass) -> int:
        """Return the prompt tokens to compute, without the cached ones."""
        return max(1, round(each.input_tokens * (1 - self.cached_ratio)))

    def input_quantile(self, ratio: float) -> int:
        """Return the prompt length that this share of the requests does not exceed."""
        return weighted_quantile(((each.input_tokens, each.weight) for each in self.lengths), ratio)


def weighted_quantile(pairs: Iterable[tuple[Value, float]], ratio: float) -> Value:
    """Return the lowest value that this share of the weight does not exceed. `pairs`: values with their weights."""
    ordered = sorted(pairs)
    least, below = ratio * sum(weight for _, weight in ordered) - 1e-9, 0.0
    for value, weight in ordered:
        below += weight
        if below >= least:
            return value
    return ordered[-1][0]


def strata(pairs: Iterable[tuple[int, int]]) -> tuple[LengthClass, ...]:
    """Return length classes of equal size, made of (input tokens, output tokens) in order of input length.

    A class has the mean lengths of its requests.
    """
    ordered = sorted(pairs)
    count = min(STRATA, len(ordered))
    classes: list[LengthClass] = []
    for index in range(count):
        part = ordered[index * len(ordered) // count : (index + 1) * len(ordered) // count]
        inputs, outputs = sum(pair[0] for pair in part), sum(pair[1] for pair in part)
        classes.append(
            LengthClass(max(1, round(inputs / len(part))), max(1, round(outputs / len(part))), len(part) / len(ordered))
        )
    return tuple(classes)
