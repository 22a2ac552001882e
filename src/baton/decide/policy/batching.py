"""Batching: which requests are in the next step, and how many tokens of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from baton.core.config import BatchLimits, SpeculationConfig
from baton.core.ports import CostModel
from baton.core.types import StepShape, prefill_pairs
from baton.decide.policy.fairness import FairnessPolicy


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

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV lies in its blocks: what attention reads for the next one."""
        ...

    @property
    def started(self) -> bool:
        """It has been in a step of this worker."""
        ...

    @property
    def tpot_s(self) -> float | None:
        """The TPOT that it was promised. None: nothing was."""
        ...


@runtime_checkable
class BatchingPolicy(Protocol):
    def select(self, candidates: Sequence[Candidate], limits: BatchLimits, cost: CostModel) -> list[tuple[int, int]]:
        """Return (index of the candidate, tokens of it) for the next step, within the limits; [] for no step.

        Candidates stand oldest first. Give each at most min(remaining_tokens, room_tokens) tokens. `cost` predicts
        steps of this worker.
        """
        ...


NO_SPECULATION = SpeculationConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherPolicies:
    """The policies of one batcher, the cost model of its worker, and its speculation limits."""

    batching: BatchingPolicy
    fairness: FairnessPolicy
    cost: CostModel
    """Predicts the steps of this worker."""
    speculation: SpeculationConfig = NO_SPECULATION


Chosen = list[tuple[int, int]]
"""Pairs (index of the candidate, tokens of it in the step)."""


@dataclass(frozen=True, slots=True)
class MixedChunked:
    """Every decoding request gets its token; what is left of the step goes to prompts, oldest first, in chunks.

    Why: a decode never waits for a prompt, and a prompt never makes a step longer than the token limit.
    Source: Sarathi-Serve (OSDI 2024), section 4.
    """

    def select(self, candidates: Sequence[Candidate], limits: BatchLimits, cost: CostModel) -> Chosen:
        """See `BatchingPolicy.select`."""
        decoding, prompts = _split(candidates)
        chosen = _decodes(candidates, decoding, limits)
        if not prompts:
            return chosen
        return chosen + _chunks(prompts, limits, requests=len(chosen), tokens=limits.step_tokens_max - len(chosen))


@dataclass(frozen=True, slots=True)
class PrefillFirst:
    """While a prompt is there, steps compute prompts only; decodes go on when none is left. No step mixes the two.

    Why: the first token comes as early as it can, and steps are all of one kind; decodes stall for every prompt.
    Source: Orca's iteration-level scheduling (OSDI 2022), with prompts first as vLLM began (SOSP 2023, section 4.5).
    """

    def select(self, candidates: Sequence[Candidate], limits: BatchLimits, cost: CostModel) -> Chosen:
        """See `BatchingPolicy.select`."""
        decoding, prompts = _split(candidates)
        chunks = _chunks(prompts, limits, requests=len(decoding), tokens=limits.step_tokens_max)
        return chunks or _decodes(candidates, decoding, limits)


@dataclass(frozen=True, slots=True)
class StaticBatching:
    """A batch is filled, its prompts are computed, then it decodes to its last end; what comes meanwhile waits.

    Why: it is what servers did before Orca, and what the others are measured against. Short answers wait for the long
    ones of their batch: their places stay empty.
    Source: request-level batching, the baseline of Orca (OSDI 2022), section 2.
    """

    def select(self, candidates: Sequence[Candidate], limits: BatchLimits, cost: CostModel) -> Chosen:
        """See `BatchingPolicy.select`. The batch is what has started: it takes no more once none of it has a prompt."""
        decoding, prompts = _split(candidates)
        members = [index for index, candidate in enumerate(candidates) if candidate.started]
        begun = [index for index in decoding if candidates[index].started]
        if members and all(candidates[index].remaining_tokens <= 1 for index in members):
            return _decodes(candidates, begun, limits)
        filling = _chunks(prompts, limits, requests=len(decoding), tokens=limits.step_tokens_max)
        return filling or _decodes(candidates, begun if members else decoding, limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloChunked:
    """As `MixedChunked`, with the largest chunk for which the step still meets the TPOT of the decodes in it.

    Why: one token limit is too much for a step with many long decodes, and too little for one with none.
    Source: Sarathi-Serve (OSDI 2024), section 4.3, where the token budget is derived from the TBT SLO, once; here it is
    derived for every step.
    """

    tpot_s: float | None = None
    """For requests that were promised nothing. None: they wait as long as a full step takes."""
    tpot_slack: float = 0.9
    """Steps take at most this share of the TPOT: a short answer also waits once for its KV and the step under way."""
    chunk_tokens_min: int = 16
    """Given to prompts even where the promise cannot be kept, so that they go on."""

    def select(self, candidates: Sequence[Candidate], limits: BatchLimits, cost: CostModel) -> Chosen:
        """See `BatchingPolicy.select`."""
        decoding, prompts = _split(candidates)
        chosen = _decodes(candidates, decoding, limits)
        if not prompts:
            return chosen
        tokens = limits.step_tokens_max - len(chosen)
        promised = [candidates[index].tpot_s or self.tpot_s for index, _ in chosen]
        bounds = [tpot_s for tpot_s in promised if tpot_s is not None]
        chunks = _chunks(prompts, limits, requests=len(chosen), tokens=tokens)
        if not bounds or not chunks:
            return chosen + chunks
        read_tokens = sum(candidates[index].computed_tokens + 1 for index, _ in chosen)
        base = StepShape(decode_requests=len(chosen), context_tokens=read_tokens)
        low, high = min(self.chunk_tokens_min, tokens), sum(count for _, count in chunks)
        middle = high  # mostly, all of it fits
        while low < high:
            chunks = _chunks(prompts, limits, requests=len(chosen), tokens=middle)
            fits = cost.step_s(_shape(base, candidates, chunks)) <= self.tpot_slack * min(bounds)
            low, high = (middle, high) if fits else (low, middle - 1)
            middle = (low + high + 1) // 2
        return chosen + _chunks(prompts, limits, requests=len(chosen), tokens=low)


def _split(candidates: Sequence[Candidate]) -> tuple[list[int], Chosen]:
    """List who decodes, and who has a prompt, with the tokens of it that have room; the oldest first."""
    decoding: list[int] = []
    prompts: Chosen = []
    for index, candidate in enumerate(candidates):
        remaining_tokens = candidate.remaining_tokens
        if remaining_tokens == 1:
            decoding.append(index)
        elif remaining_tokens > 1:
            prompts.append((index, min(remaining_tokens, candidate.room_tokens)))
    return decoding, prompts


def _decodes(candidates: Sequence[Candidate], decoding: Sequence[int], limits: BatchLimits) -> Chosen:
    """Take a token of everyone who decodes and has room, oldest first."""
    found = [(index, 1) for index in decoding if candidates[index].room_tokens > 0]
    return found[: min(limits.requests_max, limits.step_tokens_max)]


def _chunks(prompts: Chosen, limits: BatchLimits, *, requests: int, tokens: int) -> Chosen:
    """Give `tokens` to prompts, oldest first. `requests`: how many of the batch's places are taken."""
    chosen: Chosen = []
    for index, most_tokens in prompts:
        if tokens == 0 or requests + len(chosen) >= limits.requests_max:
            break
        count = min(most_tokens, tokens)
        if count > 0:
            chosen.append((index, count))
            tokens -= count
    return chosen


def _shape(base: StepShape, candidates: Sequence[Candidate], chunks: Chosen) -> StepShape:
    """Add chunks of prompts to a step's decodes."""
    return StepShape(
        prefill_tokens=sum(count for _, count in chunks),
        prefill_chunks=len(chunks),
        prefill_pairs=sum(prefill_pairs(count, candidates[index].computed_tokens) for index, count in chunks),
        decode_requests=base.decode_requests,
        context_tokens=base.context_tokens,
    )
