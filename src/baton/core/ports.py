"""Ports that policies, the planner and the simulator share."""

from __future__ import annotations

from typing import Protocol


class CostModel(Protocol):
    """Predict how long things take. One model for policies, planner and simulator."""

    def prefill_s(self, *, new_tokens: int, cached_tokens: int) -> float:
        """Seconds to compute `new_tokens` of one prompt after `cached_tokens` that need no work."""
        ...

    def step_s(self, *, prefill_tokens: int, decode_requests: int, context_tokens: int) -> float:
        """Seconds of one step: prompt tokens in it, requests that decode in it, tokens that attention reads."""
        ...

    def handoff_s(self, *, tokens: int, same_host: bool) -> float:
        """Seconds until another worker can go on with a request of `tokens` tokens."""
        ...
