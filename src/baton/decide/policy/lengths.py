"""Lengths: predict the output tokens of a request from requests that have finished. True lengths are not visible."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from baton.core.types import Request


@runtime_checkable
class LengthsPolicy(Protocol):
    def finished(self, request: Request, output_tokens: int) -> None:
        """Record the length of a finished answer."""
        ...

    def expected_tokens(self, request: Request) -> float:
        """Predict the output tokens of a request. 0 until a request has finished."""
        ...


@dataclass(slots=True, kw_only=True)
class RecentMean:
    """Mean of recent answers of the same tenant and prompt size, or of all requests while that group has too few.

    Prompts have the same size if their lengths lie between the same two powers of two.
    """

    recent_max: int = 256
    """Number of answers in each mean."""
    enough: int = 8
    """Minimum number of answers before the mean of a group is used."""
    groups_max: int = 4096
    """Maximum number of groups; the oldest is dropped first (INV-9)."""
    _all: deque[int] = field(default_factory=deque[int])
    _all_sum: int = 0
    _groups: dict[tuple[str, int], deque[int]] = field(default_factory=dict[tuple[str, int], deque[int]])
    _sums: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])

    def finished(self, request: Request, output_tokens: int) -> None:
        self._all_sum += _push(self._all, output_tokens, self.recent_max)
        group = _group(request)
        if group not in self._groups:
            if len(self._groups) == self.groups_max:
                oldest = next(iter(self._groups))
                del self._groups[oldest], self._sums[oldest]
            self._groups[group], self._sums[group] = deque(), 0
        self._sums[group] += _push(self._groups[group], output_tokens, self.recent_max)

    def expected_tokens(self, request: Request) -> float:
        group = _group(request)
        alike = self._groups.get(group, ())
        if len(alike) >= self.enough:
            return min(self._sums[group] / len(alike), request.output_tokens_max)
        if self._all:
            return min(self._all_sum / len(self._all), request.output_tokens_max)
        return 0.0


def _group(request: Request) -> tuple[str, int]:
    return (request.tenant, request.prompt_tokens.bit_length())


def _push(values: deque[int], value: int, length_max: int) -> int:
    """Append a value, drop the oldest beyond `length_max`, and return the change of the sum."""
    values.append(value)
    return value - (values.popleft() if len(values) > length_max else 0)
