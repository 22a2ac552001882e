"""Exponential back-off for retries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double with every failure in a row, up to a limit."""

    first_s: float
    max_s: float

    def pause_s(self, failures: int) -> float:
        """Return the pause in seconds after this many failures in a row, at least 1."""
        return min(self.max_s, self.first_s * 2.0 ** min(failures - 1, 64))
