"""Fairness: the order in which waiting requests are served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from baton.core.types import Request


@runtime_checkable
class FairnessPolicy(Protocol):
    """The order of waiting requests."""

    def key(self, request: Request) -> tuple[float, ...]:
        """Return the sort key of a waiting request. The lowest key is served first."""
        ...


@runtime_checkable
class BacklogOrder(FairnessPolicy, Protocol):
    """An order in which a request may overtake the requests that an overload has left."""

    def overtakes(self, request: Request, *, gap_s: float, oldest_wait_s: float, prompt_s: float) -> bool:
        """Return whether a new request goes before the waiting ones of its priority that have no SLO.

        `gap_s`: time since the previous arrival. `oldest_wait_s`: wait of the oldest of the others. `prompt_s`:
        predicted time of its prompt.
        """
        ...


@runtime_checkable
class ServiceFairness(FairnessPolicy, Protocol):
    """An order that depends on the service that tenants receive. Its keys change.

    Requests wait for their turn at the coordinator, where one object counts the service of the whole fleet. Workers
    then serve them by turn.
    """

    def joined(self, request: Request) -> None:
        """Record that the request waits."""
        ...

    def left(self, request: Request) -> None:
        """Record that the request no longer waits: its turn has come, or it has ended."""
        ...

    def began(self, request: Request, *, expected_tokens: float) -> None:
        """Record that the turn of the request has come. `expected_tokens`: predicted length of its answer, or 0."""
        ...

    def served(self, request: Request, *, output_tokens: int) -> None:
        """Record output tokens of a request that has begun."""
        ...

    def ended(self, request: Request) -> None:
        """Record the end of a request that has begun."""
        ...


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed:
    """Serve by priority (lower first), then by arrival."""

    def key(self, request: Request) -> tuple[float, ...]:
        return (float(request.priority), request.arrived_at_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloOrder(FirstComeFirstServed):
    """Serve requests with an SLO in order of arrival, with a limited effect of priority; others by strict priority.

    Why: admission predicts TTFT for the place in the queue at arrival. With strict priorities any number of later
    requests can overtake, and requests miss an SLO that they could meet. Here the priority moves a request with an SLO
    by at most `head_start_ratio` of its TTFT in either direction. Requests without an SLO are sorted as in
    `FirstComeFirstServed`; requests with an SLO count as priority 0 among them.

    After an overload has ended, a new request without an SLO does not wait for the backlog. It overtakes only if it
    arrives so long after the last one that such requests use at most half of the worker: the backlog goes on at half
    speed or more.
    """

    head_start_ratio: float = 0.25
    """The most urgent priority counts as an arrival earlier by this share of the TTFT. Must be below 0.5."""
    overtake_gap: float = 2.0
    """Minimum (time since the previous arrival / predicted time of the prompt) to overtake a backlog."""
    backlog_wait: float = 4.0
    """Minimum (wait of the oldest request / predicted time of the new prompt) of a backlog."""

    def key(self, request: Request) -> tuple[float, ...]:
        if request.slo is None:
            return (float(request.priority), request.arrived_at_s)
        between = request.priority / (1 + abs(request.priority))  # maps any integer to (-1, 1)
        return (0.0, request.arrived_at_s + self.head_start_ratio * request.slo.ttft_s * between)

    def overtakes(self, request: Request, *, gap_s: float, oldest_wait_s: float, prompt_s: float) -> bool:
        if request.slo is not None:
            return False
        return gap_s >= self.overtake_gap * prompt_s and oldest_wait_s >= self.backlog_wait * prompt_s
