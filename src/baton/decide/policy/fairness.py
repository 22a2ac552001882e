"""Fairness: the order in which waiting requests are served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from baton.core.types import Request


@runtime_checkable
class FairnessPolicy(Protocol):
    """Sort keys of waiting requests. Keys may change: callers sort again when `version` has changed."""

    @property
    def version(self) -> int:
        """Return a number that changes whenever a key may have changed. Constant if keys never change."""
        ...

    def key(self, request: Request) -> tuple[float, ...]:
        """Return the sort key of a waiting request. The lowest key is served first."""
        ...

    def joined(self, request: Request) -> None:
        """Record that the request waits, for the first time or again."""
        ...

    def left(self, request: Request) -> None:
        """Record that the request no longer waits: its turn has come or it has ended."""
        ...

    def served(self, request: Request, *, prompt_tokens: int, output_tokens: int) -> None:
        """Record service: prompt tokens when the turn of the request comes, output tokens as they are sampled."""
        ...


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed:
    """Serve by priority (lower first), then by arrival."""

    @property
    def version(self) -> int:
        return 0

    def key(self, request: Request) -> tuple[float, ...]:
        return (float(request.priority), request.arrived_at_s)

    def joined(self, request: Request) -> None:
        pass

    def left(self, request: Request) -> None:
        pass

    def served(self, request: Request, *, prompt_tokens: int, output_tokens: int) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class SloOrder(FirstComeFirstServed):
    """Serve requests with an SLO in order of arrival, with a limited effect of priority; others by strict priority.

    Why: admission predicts TTFT for the place in the queue at arrival. With strict priorities any number of later
    requests can overtake, and requests miss an SLO that they could meet. Here the priority moves a request with an SLO
    by at most `head_start_ratio` of its TTFT in either direction. Requests without an SLO are sorted as in
    `FirstComeFirstServed`; requests with an SLO count as priority 0 among them.
    """

    head_start_ratio: float = 0.25
    """The most urgent priority counts as an arrival earlier by this share of the TTFT. Must be below 0.5."""

    def key(self, request: Request) -> tuple[float, ...]:
        if request.slo is None:
            return (float(request.priority), request.arrived_at_s)
        between = request.priority / (1 + abs(request.priority))  # maps any integer to (-1, 1)
        return (0.0, request.arrived_at_s + self.head_start_ratio * request.slo.ttft_s * between)
