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
