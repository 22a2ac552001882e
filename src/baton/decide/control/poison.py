"""Prompts that end workers: a request that did so in every attempt is refused when it is sent again."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.messages import CloseRequest
from baton.core.types import BlockHash, Request

REFUSED_S = 600.0
"""Time for which such a prompt is refused. Deaths that had another cause are forgotten then."""
PROMPTS_MAX = 1024
"""Maximum number of prompts that are remembered; the oldest is dropped first (INV-9)."""


@dataclass(slots=True)
class PoisonPrompts:
    """Prompts of requests that failed because every worker that ran them died."""

    _refused_until_s: dict[BlockHash, float] = field(default_factory=dict[BlockHash, float])

    def add(self, request: Request, now_s: float) -> None:
        """Refuse this prompt from now on. Does nothing for a request without a hash."""
        if request.prompt_hash:
            self._refused_until_s.pop(request.prompt_hash, None)
            self._refused_until_s[request.prompt_hash] = now_s + REFUSED_S
            if len(self._refused_until_s) > PROMPTS_MAX:
                del self._refused_until_s[next(iter(self._refused_until_s))]

    def refuse(self, request: Request, now_s: float) -> CloseRequest | None:
        """Return the command that closes a request whose prompt is refused. None: it may run."""
        left_s = self._refused_until_s.get(request.prompt_hash, now_s) - now_s
        if left_s <= 0:
            return None
        reason = (
            "every worker that ran this prompt died, so the server refuses it for "
            f"{left_s:.0f} s more; change the prompt, and see the server's output for the cause"
        )
        return CloseRequest(request.id, "failed", reason)
