"""Batching: which requests are in the next step, and how many tokens of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from baton.core.config import BatchLimits


class Candidate(Protocol):
    """A request that could be in the next step."""

    @property
    def remaining_tokens(self) -> int:
        """Tokens that exist and are not computed: 1 while it decodes, more while its prompt is computed."""
        ...

    @property
    def room_tokens(self) -> int:
        """Tokens that its block table still has room for."""
        ...


@runtime_checkable
class BatchingPolicy(Protocol):
    def select(self, candidates: Sequence[Candidate], limits: BatchLimits) -> list[tuple[int, int]]:
        """Return (index of the candidate, tokens of it) for the next step, within the limits; [] for no step.

        Candidates stand oldest first. Give each at most min(remaining_tokens, room_tokens) tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class MixedChunked:
    """Every decoding request gets its token; what is left of the step goes to prompts, oldest first, in chunks.

    Why: a decode never waits for a prompt, and a prompt never makes a step longer than the token limit.
    Source: Sarathi-Serve (OSDI 2024), section 4.
    """

    def select(self, candidates: Sequence[Candidate], limits: BatchLimits) -> list[tuple[int, int]]:
        """See `BatchingPolicy.select`."""
        ready = [(index, lane) for index, lane in enumerate(candidates) if lane.room_tokens > 0]
        decodes = [(index, 1) for index, lane in ready if lane.remaining_tokens == 1]
        chosen = decodes[: min(limits.requests_max, limits.step_tokens_max)]
        budget_tokens = limits.step_tokens_max - len(chosen)
        for index, lane in ready:
            if lane.remaining_tokens <= 1:
                continue
            if budget_tokens == 0 or len(chosen) == limits.requests_max:
                break
            count = min(lane.remaining_tokens, lane.room_tokens, budget_tokens)
            chosen.append((index, count))
            budget_tokens -= count
        return chosen
