"""Fairness: in which order waiting requests are served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from baton.core.types import Request


@runtime_checkable
class FairnessPolicy(Protocol):
    def key(self, request: Request) -> tuple[float, ...]:
        """Return what waiting requests are sorted by: the least is served first. Constant while a request waits."""
        ...


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed:
    """By priority (lower first), then by arrival."""

    def key(self, request: Request) -> tuple[float, ...]:
        """See `FairnessPolicy.key`."""
        return (float(request.priority), request.arrived_at_s)
