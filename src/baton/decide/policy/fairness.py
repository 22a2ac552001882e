"""Fairness: in which order waiting requests are served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from baton.core.types import Request


@runtime_checkable
class FairnessPolicy(Protocol):
    """Keys may change: whoever sorts by them sorts anew when `version` has changed."""

    @property
    def version(self) -> int:
        """Return a number that changes whenever a key may have changed. Constant where keys never do."""
        ...

    def key(self, request: Request) -> tuple[float, ...]:
        """Return what waiting requests are sorted by: the least is served first."""
        ...

    def joined(self, request: Request) -> None:
        """Note that the request waits to be served, now or again."""
        ...

    def left(self, request: Request) -> None:
        """Note that the request no longer waits: it is served, or it is gone."""
        ...

    def served(self, request: Request, *, prompt_tokens: int, output_tokens: int) -> None:
        """Note what the request was given: prompt tokens when its turn has come, output tokens as they come out."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SloOrder:
    """Who was promised a first token keeps the place that the promise was made for; others stand by their priority.

    Why: admission predicts a first token behind what waits already. Strict priorities let any number of later requests
    overtake, and promises that could be kept are broken. Here priority moves a promised request by at most
    `head_start_ratio` of its promised TTFT, to either side, and those that were promised nothing stand as they do in
    `FirstComeFirstServed`, the promised ones among them with priority 0.
    """

    head_start_ratio: float = 0.25
    """A request of the most urgent priority is served as though it had come so much of its TTFT earlier. Below 0.5."""

    @property
    def version(self) -> int:
        """See `FairnessPolicy.version`."""
        return 0

    def key(self, request: Request) -> tuple[float, ...]:
        """See `FairnessPolicy.key`."""
        if request.slo is None:
            return (float(request.priority), request.arrived_at_s)
        between = request.priority / (1 + abs(request.priority))  # any integer, between -1 and 1
        return (0.0, request.arrived_at_s + self.head_start_ratio * request.slo.ttft_s * between)

    def joined(self, request: Request) -> None:
        """See `FairnessPolicy.joined`. Nothing changes."""

    def left(self, request: Request) -> None:
        """See `FairnessPolicy.left`. Nothing changes."""

    def served(self, request: Request, *, prompt_tokens: int, output_tokens: int) -> None:
        """See `FairnessPolicy.served`. Nothing changes."""


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed:
    """By priority (lower first), then by arrival."""

    @property
    def version(self) -> int:
        """See `FairnessPolicy.version`."""
        return 0

    def key(self, request: Request) -> tuple[float, ...]:
        """See `FairnessPolicy.key`."""
        return (float(request.priority), request.arrived_at_s)

    def joined(self, request: Request) -> None:
        """See `FairnessPolicy.joined`. Nothing changes."""

    def left(self, request: Request) -> None:
        """See `FairnessPolicy.left`. Nothing changes."""

    def served(self, request: Request, *, prompt_tokens: int, output_tokens: int) -> None:
        """See `FairnessPolicy.served`. Nothing changes."""
