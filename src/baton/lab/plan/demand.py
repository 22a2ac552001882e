"""Workload of a plan: request rate, lengths and SLO."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.core.types import Slo

STRATA = 24
"""Number of length classes of a trace. The screening evaluates the cost model once per class."""


@dataclass(frozen=True, slots=True)
class LengthClass:
    """Requests of similar length."""

    input_tokens: int
    output_tokens: int
    weight: float
    """Share of all requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadDemand:
    """Workload in the form that the screening reads."""

    rate_rps: float | None
    """Wanted request rate. None: as much as the hardware gives."""
    lengths: tuple[LengthClass, ...]
    cached_ratio: float
    """Expected share of prompt tokens in the prefix cache."""
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
        """Mean context of a decoding request. Long outputs weigh more, because they decode for longer."""
        whole = sum(
            each.weight * each.output_tokens * (each.input_tokens + each.output_tokens / 2) for each in self.lengths
        )
        return whole / self.output_tokens

    def new_tokens(self, each: LengthClass) -> int:
        """Return the prompt tokens of a class that need prefill."""
        return max(1, round(each.input_tokens * (1 - self.cached_ratio)))

    def input_quantile(self, ratio: float) -> int:
        """Return the prompt length that `ratio` of the requests do not exceed."""
        below = 0.0
        ordered = sorted(self.lengths, key=lambda each: each.input_tokens)
        for each in ordered:
            below += each.weight
            if below >= ratio - 1e-9:
                return each.input_tokens
        return ordered[-1].input_tokens


def strata(pairs: Iterable[tuple[int, int]]) -> tuple[LengthClass, ...]:
    """Return classes of similar input length from pairs of input and output tokens, about equal in weight.

    Each class has the mean lengths of its requests.
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
