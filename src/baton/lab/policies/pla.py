"""PLA-Serve: keep short prompts apart from long ones, on workers of their own or in steps of their own.

Source: PLA-Serve (arXiv 2601.11589, also named LAPS): its dual queue, in space over several prefill workers and in time
on one. Its waiting window for batches of short prompts and its CUDA graphs are not reproduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.config import BatchLimits
from baton.core.ports import CostModel
from baton.core.types import ClusterView, Request, WorkerId, WorkerView
from baton.decide.policy.batching import Candidate, MixedChunked

SHORT_TOKENS_MAX = 256
"""Prompt tokens to compute up to which a prompt is short: reading the weights then takes most of its step."""
_MEMORY = 0.98
"""Factor by which each new prompt reduces the weight of all earlier ones."""


@dataclass(slots=True, kw_only=True)
class PlaRouting:
    """Divide the prefill workers between short and long prompts by their recent tokens. An idle worker takes either."""

    short_tokens_max: int = SHORT_TOKENS_MAX
    _short_tokens: float = 0.0
    _long_tokens: float = 0.0

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        hits, tokens = cluster.prefix_hit_tokens, request.prompt_tokens
        new_tokens = tokens - min(tokens, max((hits.get(worker.host, 0) for worker in candidates), default=0))
        is_short = new_tokens <= self.short_tokens_max
        self._short_tokens = _MEMORY * self._short_tokens + is_short * new_tokens
        self._long_tokens = _MEMORY * self._long_tokens + (not is_short) * new_tokens
        ordered = sorted(candidates, key=lambda worker: worker.id)
        if len(ordered) > 1:
            share_ratio = self._short_tokens / max(1.0, self._short_tokens + self._long_tokens)
            short_workers = min(len(ordered) - 1, max(1, round(share_ratio * len(ordered))))
            own = ordered[:short_workers] if is_short else ordered[short_workers:]
            ordered = own + [worker for worker in ordered if worker not in own and not worker.queued_tokens]
        return min(ordered, key=lambda each: (each.queued_tokens, -hits.get(each.host, 0), each.id)).id


@dataclass(slots=True, kw_only=True)
class PlaBatching:
    """Batch as `mixed-chunked` does, but with prompts of one length class in a step: short ones first."""

    short_tokens_max: int = SHORT_TOKENS_MAX
    short_steps_max: int = 8
    """A step with long prompts follows after so many steps with short ones, so that long prompts make progress."""
    _short_steps: int = 0

    def select(self, candidates: Sequence[Candidate], limits: BatchLimits, cost: CostModel) -> list[tuple[int, int]]:
        kinds = [self._kind(candidate) for candidate in candidates]
        takes_short = "short" in kinds and ("long" not in kinds or self._short_steps < self.short_steps_max)
        self._short_steps = self._short_steps + 1 if takes_short and "long" in kinds else 0
        left_out = "long" if takes_short else "short"
        kept = [index for index, kind in enumerate(kinds) if kind != left_out]
        chosen = MixedChunked().select([candidates[index] for index in kept], limits, cost)
        if all(kinds[kept[index]] == "decode" for index, _ in chosen):  # no prompt of this class has KV blocks
            return MixedChunked().select(candidates, limits, cost)
        return [(kept[index], tokens) for index, tokens in chosen]

    def _kind(self, candidate: Candidate) -> str:
        if candidate.remaining_tokens <= 1:
            return "decode"
        # A prompt that is partly computed was longer than a step.
        return "long" if candidate.started or candidate.remaining_tokens > self.short_tokens_max else "short"
