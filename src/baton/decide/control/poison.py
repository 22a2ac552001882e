"""Prompts that crash workers: a request whose every attempt killed a worker without other requests is refused."""

from __future__ import annotations

from dataclasses import dataclass, field

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
