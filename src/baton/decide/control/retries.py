"""Retries: whether a request whose worker or host was lost is tried again, and which prompts are refused for that.

In a fleet that fails under its load, each further attempt adds load, which kills more workers. So each retry is taken
from a budget, which refills with time and with admitted requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct
from msgspec.structs import replace

from baton.core.messages import CloseRequest
from baton.core.types import BlockHash, Request, Sampling
from baton.decide.control.flight import Flight

REFUSED_S = 600.0
"""Time for which such a prompt is refused. Deaths that had another cause are forgotten then."""
PROMPTS_MAX = 1024
"""Maximum number of prompts that are remembered; the oldest is dropped first (INV-9)."""

_Computation = tuple[BlockHash, Sampling]
"""Hash of a prompt, and the sampling parameters except the seed: it differs if the server chooses it."""


@dataclass(slots=True)
class PoisonPrompts:
    """Prompts to refuse: every worker that ran such a prompt died, and ran no other request at that time."""

    _refused_until_s: dict[_Computation, float] = field(default_factory=dict[_Computation, float])

    def add(self, flight: Flight, now_s: float) -> None:
        """Refuse the prompt of a failed request from now on.

        Does nothing for a request without a hash, or if another request ran on one of the workers that died: that
        request may be the cause.
        """
        if flight.request.prompt_hash and flight.deaths_alone == flight.deaths:
            computation = _computation_of(flight.request)
            self._refused_until_s.pop(computation, None)
            self._refused_until_s[computation] = now_s + REFUSED_S
            if len(self._refused_until_s) > PROMPTS_MAX:
                del self._refused_until_s[next(iter(self._refused_until_s))]

    def refuse(self, request: Request, now_s: float) -> CloseRequest | None:
        """Return the command that closes a request whose prompt is refused. None: it may run."""
        if not self._refused_until_s:
            return None
        left_s = self._refused_until_s.get(_computation_of(request), now_s) - now_s
        if left_s <= 0:
            return None
        reason = (
            "every worker that ran this prompt died, so the server refuses it for "
            f"{left_s:.0f} s more; change the request, and see the server's output for the cause"
        )
        return CloseRequest(request.id, "failed", reason)


def _computation_of(request: Request) -> _Computation:
    return request.prompt_hash, replace(request.sampling, seed=0)


_MINUTE_S = 60.0


class RetryRules(Struct, frozen=True, kw_only=True):
    """Limits of retries: the attempts of one request, and a budget of retries for the whole fleet."""

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
