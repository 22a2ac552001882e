"""Retries: whether a request whose worker or host was lost is tried again.

In a fleet that fails under its load, each further attempt adds load, which kills more workers. So each retry is taken
from a budget, which refills with time and with admitted requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from baton.core.messages import CloseRequest
from baton.decide.control.flight import Flight
from baton.decide.control.poison import PoisonPrompts

_MINUTE_S = 60.0


class RetryRules(Struct, frozen=True, kw_only=True):
    """The attempts of a request, the size of the budget, and how fast it refills."""

    attempts_max: int = 3
    """Maximum attempts of a request whose workers die."""
    per_minute: int = 1024
    """Size of the budget, and retries that it regains per minute."""
    ratio: float = 0.2
    """Retries that the budget regains per admitted request."""


@dataclass(slots=True)
class Retries:
    """Decides about retries, and refuses prompts that crash workers."""

    rules: RetryRules = field(default_factory=RetryRules)
    poison: PoisonPrompts = field(default_factory=PoisonPrompts)
    _left: float = field(init=False)
    _refilled_at_s: float = 0.0

    def __post_init__(self) -> None:
        self._left = float(self.rules.per_minute)

    def admitted(self) -> None:
        """Refill the budget for a request that was admitted."""
        self._left = min(float(self.rules.per_minute), self._left + self.rules.ratio)

    def refuse(self, flight: Flight, death: str | None, now_s: float, *, is_alone: bool) -> CloseRequest | None:
        """Spend one retry on a request whose worker was lost. Return the command that closes it if none is allowed.

        `death`: why the worker died. None: no request can have caused the loss. `is_alone`: the worker ran no other
        request.
        """
        request_id = flight.request.id
        flight.deaths += death is not None
        flight.deaths_alone += death is not None and is_alone
        if flight.deaths == self.rules.attempts_max:
            self.poison.add(flight, now_s)
            return CloseRequest(request_id, "failed", f"the worker died under it {flight.deaths} times, last: {death}")
        most, per_s = float(self.rules.per_minute), self.rules.per_minute / _MINUTE_S
        self._left = min(most, self._left + per_s * (now_s - self._refilled_at_s))
        self._refilled_at_s = now_s
        if self._left >= 1.0:
            self._left -= 1.0
            return None
        why = (
            f"its worker was lost ({death or 'with its host'}), and the budget of retries is empty: it has "
            f"{self.rules.per_minute} a minute (survival.retries_per_minute) and {self.rules.ratio:g} for each "
            "admitted request (survival.retry_ratio); send it again later"
        )
        return CloseRequest(request_id, "rejected", why, "retries", (1.0 - self._left) / per_s if per_s else _MINUTE_S)
