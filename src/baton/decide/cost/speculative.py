"""Cost model of speculative decoding with a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.ports import CostModel
from baton.core.types import StepShape


def accepted_tokens(*, draft_tokens: int, acceptance_ratio: float) -> float:
    """Return the mean number of tokens per check: accepted drafts and the one that the target adds.

    Source: Leviathan et al. (2023), (1 - a^(n+1)) / (1 - a) for independent acceptance.
    """
    return sum(acceptance_ratio**place for place in range(draft_tokens + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeCost:
    """Cost of a target model that checks `draft_tokens` of a draft model. Implements `CostModel`.

    A decode step costs the share of a check per output token, so that a simulated step still yields one token. Steps
    with prompt tokens run without drafts.
    """

    target: CostModel
    """The target without drafts."""
    check: CostModel
    """The target with `query_tokens` = 1 + draft_tokens."""
    draft: CostModel
    draft_tokens: int
    acceptance_ratio: float

    @property
    def _tokens(self) -> float:
        return accepted_tokens(draft_tokens=self.draft_tokens, acceptance_ratio=self.acceptance_ratio)

    def prefill_s(self, *, new_tokens: int, cached_tokens: int) -> float:
        return self.target.prefill_s(new_tokens=new_tokens, cached_tokens=cached_tokens)

    def step_s(self, shape: StepShape) -> float:
        if shape.prefill_tokens:
            return self.target.step_s(shape)
        return (self.check.step_s(shape) + self.draft_tokens * self.draft.step_s(shape)) / self._tokens

    def decode_run_s(self, *, requests: int, context_tokens: int, steps: int) -> Sequence[float]:
        checks_s = self.check.decode_run_s(requests=requests, context_tokens=context_tokens, steps=steps)
        drafts_s = self.draft.decode_run_s(requests=requests, context_tokens=context_tokens, steps=steps)
        tokens = self._tokens
        return [
            (check_s + self.draft_tokens * draft_s) / tokens
            for check_s, draft_s in zip(checks_s, drafts_s, strict=True)
        ]

    def handoff_s(self, *, tokens: int, same_host: bool) -> float:
        return self.target.handoff_s(tokens=tokens, same_host=same_host)

    def on(self, kind: str) -> SpeculativeCost:
        return self
