"""What has to be served: how many requests a second, how long, and within which times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.core.types import Slo

STRATA = 24
"""Classes of requests that a trace is reduced to: the screening asks the cost model about each."""


@dataclass(frozen=True, slots=True)
class LengthClass:
    """Requests of about one length."""

    input_tokens: int
    output_tokens: int
    weight: float
    """Their share of all requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadDemand:
    """The workload, reduced to what the screening asks for."""

    rate_rps: float | None
    """None: as much as the hardware gives."""
    lengths: tuple[LengthClass, ...]
    cached_ratio: float
    """Share of a prompt's tokens that the prefix cache is expected to hold."""
    slo: Slo
    attainment_ratio: float
    """Share of the requests that must meet the SLO."""

    @property
    def input_tokens(self) -> float:
        """Mean prompt."""
        return sum(each.weight * each.input_tokens for each in self.lengths)

    @property
    def output_tokens(self) -> float:
        """Mean answer."""
        return sum(each.weight * each.output_tokens for each in self.lengths)

    @property
    def context_tokens(self) -> float:
        """Mean context of a request while it decodes: long answers are met more often than they arrive."""
        whole = sum(
            each.weight * each.output_tokens * (each.input_tokens + each.output_tokens / 2) for each in self.lengths
        )
        return whole / self.output_tokens

    def new_tokens(self, each: LengthClass) -> int:
        """Tokens of a prompt that have to be computed."""
        return max(1, round(each.input_tokens * (1 - self.cached_ratio)))

    def input_quantile(self, ratio: float) -> int:
        """Prompt length that this share of the requests does not exceed."""
        below = 0.0
        ordered = sorted(self.lengths, key=lambda each: each.input_tokens)
        for each in ordered:
            below += each.weight
            if below >= ratio - 1e-9:
                return each.input_tokens
        return ordered[-1].input_tokens


def strata(pairs: Iterable[tuple[int, int]]) -> tuple[LengthClass, ...]:
    """Reduce pairs of input and output tokens to classes of equal weight by input length, each with its means."""
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
