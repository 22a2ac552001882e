"""Batching: choose the requests of the next step and the number of tokens of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from operator import itemgetter
from typing import Protocol, runtime_checkable

from baton.core.config import BatchLimits, SpeculationConfig
from baton.core.ports import CostModel
from baton.core.types import StepShape, prefill_pairs, prompt_step
from baton.decide.policy.fairness import FairnessPolicy


class Candidate(Protocol):
    """A request that may be in the next step."""

    @property
    def remaining_tokens(self) -> int:
        """Known tokens that are not computed yet: 1 while the request decodes, more during its prompt."""
        ...

    @property
    def room_tokens(self) -> int:
        """Tokens that still fit into the block table."""
        ...

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV is in the block table: the context that attention reads for the next token."""
        ...

    @property
    def started(self) -> bool:
        """True once the request has been in a step of this worker."""
        ...

    @property
    def last_turn(self) -> int:
        """Sequence number of its last slice on this worker. 0: it had none."""
        ...

    @property
    def client(self) -> int:
        """Number of the client that sent the request. 0: not known."""
        ...

    @property
    def tpot_s(self) -> float | None:
        """The TPOT SLO of the request. None: it has no SLO."""
        ...

    @property
    def ahead_s(self) -> float:
        """Seconds by which its newest token came before the pace of its TPOT SLO requires it. Negative: late."""
        ...

    @property
    def ttft_s(self) -> float | None:
        """The TTFT SLO of the request. None: it has no SLO."""
        ...

    @property
    def urgent_ttft_s(self) -> float | None:
        """The shortest TTFT SLO of the more urgent classes. None: they have none."""
        ...


@runtime_checkable
class BatchingPolicy(Protocol):
    def select(self, candidates: Sequence[Candidate], limits: BatchLimits, cost: CostModel) -> list[tuple[int, int]]:
        """Return pairs (index of the candidate, tokens) for the next step, within the limits; [] for no step.

        Candidates are sorted, oldest first. Each gets at most min(remaining_tokens, room_tokens) tokens. `cost`
        predicts steps of this worker.
        """
        ...


NO_SPECULATION = SpeculationConfig()
_EMPTY, _ONE_TOKEN = StepShape(), prompt_step(1, 0)
SHORT_CHUNK_TOKENS, SHORT_CHUNK_RATIO = 64, 1.4
"""A chunk up to so many tokens may take 1.4 times the bound of its step, if a shorter one costs nearly as much."""
FIXED_COSTS_MIN = 8
"""Bounds on the prompts of a step are at least this many times the fixed cost of a step, so that steps waste little."""
SHARED_RATIO = 0.1
"""Maximum share of the TTFT SLO that several prompts in one step take together. Predictions use it, too."""
PACE_RATIO = 0.95
"""The pace of an answer, as a share of its TPOT SLO. Urgent prompts may take the time by which all answers beside them
are ahead of their pace. The rest covers handoffs and errors of predictions."""
URGENT_RATIO = 0.25
"""Prompts are urgent if they would take more than this share of their shortest TTFT SLO. Others keep the ITL steady."""
BACKLOG_STEPS = 2
"""Waiting prompts that fill this many steps are a backlog: steps are full, for throughput instead of mean TTFT."""


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
    """Give each decoding request one token, and the rest of the step to prompts in chunks, oldest first.

    Why: a decode never waits for a prompt, and a prompt never extends a step beyond the token limit.
    Source: Sarathi-Serve (OSDI 2024), section 4.
    """

    def select(self, candidates: Sequence[Candidate], limits: BatchLimits, cost: CostModel) -> Chosen:
        decoding, prompts = _split(candidates)
        chosen = _decodes(candidates, decoding, limits, keeps_place=bool(prompts))
        if not prompts:
            return chosen
        return chosen + _chunks(prompts, limits, requests=len(chosen), tokens=limits.step_tokens_max - len(chosen))


@dataclass(frozen=True, slots=True)
class PrefillFirst:
    """Compute only prompts while there are any, and decode afterwards. No step mixes the two.

    Why: TTFT is as low as possible and steps are uniform. The price: every prompt stalls all decodes.
    Source: Orca's iteration-level scheduling (OSDI 2022), with prompts first as vLLM began (SOSP 2023, section 4.5).
    """

    def select(self, candidates: Sequence[Candidate], limits: BatchLimits, cost: CostModel) -> Chosen:
        decoding, prompts = _split(candidates)
        chunks = _chunks(prompts, limits, requests=len(decoding), tokens=limits.step_tokens_max)
        return chunks or _decodes(candidates, decoding, limits)


@dataclass(frozen=True, slots=True)
class StaticBatching:
    """Fill a batch, compute its prompts, and decode until its last request ends. Later requests wait.

    Why: servers worked like this before Orca, so it is a baseline. Places of short answers stay empty until the longest
    answer of the batch ends.
    Source: request-level batching, the baseline of Orca (OSDI 2022), section 2.
    """

    def select(self, candidates: Sequence[Candidate], limits: BatchLimits, cost: CostModel) -> Chosen:
        # The batch is the set of requests that have started. It is closed once all of its prompts are computed.
        decoding, prompts = _split(candidates)
        members = [index for index, candidate in enumerate(candidates) if candidate.started]
        begun = [index for index in decoding if candidates[index].started]
        if members and all(candidates[index].remaining_tokens <= 1 for index in members):
            return _decodes(candidates, begun, limits)
        filling = _chunks(prompts, limits, requests=len(decoding), tokens=limits.step_tokens_max)
        return filling or _decodes(candidates, begun if members else decoding, limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloChunked:
    """Batch as `MixedChunked` does, with the largest chunk for which all decodes of the step meet their TPOT SLO.

    Why: one fixed token limit is too high for a step with many long decodes, and too low for a step without decodes.
    Source: Sarathi-Serve (OSDI 2024), section 4.3, which derives the token budget from the ITL target once. This policy
    derives it for every step. The TPOT is a mean over an answer. So if prompts are urgent, a step takes longer by the
    time by which the tokens of all its decodes came early: the answers meet their SLO even if they end with this step.

    The time of the prompts in a step is bounded, too. A step cannot be interrupted, so all prompts in it wait for its
    end, a more urgent request that arrives waits for it, and the work for requests that are cancelled meanwhile is
    lost.
    """

    tpot_s: float | None = None
    """TPOT target of requests without an SLO. None: such requests do not limit the step."""
    tpot_slack: float = 0.9
    """A step takes at most this share of the TPOT, unless prompts are urgent. The rest covers the handoff and a step
    that runs at arrival."""
    chunk_tokens_min: int = 16
    """Minimum prompt tokens per step, even if the step then misses the TPOT: prompts must make progress."""
    prompt_s_max: float | None = None
    """Maximum predicted time of the prompts in a step. None: only SLOs bound it."""
    ttft_ratio: float = 0.25
    """The prompts in a step take at most this share of the shortest TTFT SLO of more urgent classes."""
    shared_ratio: float = SHARED_RATIO
    """Several prompts in a step take at most this share of their shortest TTFT SLO, because all first tokens come
    at the step's end. Without an SLO, their number is the one with the lowest mean TTFT. A single prompt is not
    limited: splitting it shortens no other wait."""

    def select(self, candidates: Sequence[Candidate], limits: BatchLimits, cost: CostModel) -> Chosen:
        decoding, prompts = _split(candidates)
        chosen = _decodes(candidates, decoding, limits, keeps_place=bool(prompts))
        if not prompts:
            return chosen

        def chunks_of(tokens: int) -> Chosen:
            return _chunks(prompts, limits, requests=len(chosen), tokens=tokens)

        chunks = chunks_of(limits.step_tokens_max - len(chosen))
        if not chunks:
            return chosen

        def prompts_s(tokens: int) -> float:
            return cost.step_s(_shape(_EMPTY, candidates, chunks_of(tokens)))

        tokens, waiting_tokens = sum(count for _, count in chunks), sum(count for _, count in prompts)
        bounds = self._prompt_bounds([candidates[index] for index, _ in chunks], chunks[0][1], cost)
        if not bounds and len(chunks) > 1 and waiting_tokens < BACKLOG_STEPS * limits.step_tokens_max:
            fixed_s = cost.step_s(_ONE_TOKEN)
            waiting_s = prompts_s(tokens) * waiting_tokens / tokens - fixed_s
            bounds = [(fixed_s + sqrt(fixed_s * max(0.0, waiting_s)), chunks[0][1])]
        for bound_s, tokens_min in bounds:
            tokens = _largest(tokens_min, tokens, prompts_s, bound_s)
        targets = [candidates[index].tpot_s or self.tpot_s for index, _ in chosen]
        tpots_s = [tpot_s for tpot_s in targets if tpot_s is not None]
        if tpots_s:
            read_tokens = sum(candidates[index].computed_tokens + 1 for index, _ in chosen)
            base = StepShape(decode_requests=len(chosen), context_tokens=read_tokens)

            def step_s(tokens: int) -> float:
                return cost.step_s(_shape(base, candidates, chunks_of(tokens)))

            bound_s = self.tpot_slack * min(tpots_s)
            kept = _largest(self.chunk_tokens_min, tokens, step_s, bound_s)
            urgent_s = [ttft_s for index, _ in prompts if (ttft_s := candidates[index].ttft_s) is not None]
            if urgent_s and waiting_tokens * bound_s > URGENT_RATIO * min(urgent_s) * kept:
                bound_s = min(map(self._decode_bound_s, [candidates[index] for index, _ in chosen]))
                kept = _largest(self.chunk_tokens_min, tokens, step_s, bound_s)
            short = min(tokens, SHORT_CHUNK_TOKENS)
            is_longer = 0 < kept < short and pays_longer_chunk(step_s, kept, short, bound_s)
            tokens = short if is_longer else kept
        return chosen + chunks_of(tokens)

    def _decode_bound_s(self, decode: Candidate) -> float:
        """Return the time within which the next token of a decode must come, so that the answer keeps its TPOT."""
        tpot_s = decode.tpot_s or self.tpot_s
        return inf if tpot_s is None else self.tpot_slack * tpot_s + max(0.0, decode.ahead_s)

    def _prompt_bounds(
        self, prompts: Sequence[Candidate], first_tokens: int, cost: CostModel
    ) -> list[tuple[float, int]]:
        """Return the bounds of the time of these prompts in a step, each with the tokens that it always allows."""
        urgent_s = [prompt.urgent_ttft_s for prompt in prompts if prompt.urgent_ttft_s is not None]
        own_s = [prompt.ttft_s for prompt in prompts if prompt.ttft_s is not None]
        strict_s = [self.ttft_ratio * ttft_s for ttft_s in urgent_s]
        if self.prompt_s_max is not None:
            strict_s.append(self.prompt_s_max)
        bounds = [(min(strict_s), self.chunk_tokens_min)] if strict_s else []
        if own_s and len(prompts) > 1:
            bounds.append((self.shared_ratio * min(own_s), first_tokens))
        least_s = FIXED_COSTS_MIN * cost.step_s(_ONE_TOKEN) if bounds else 0.0
        return [(max(bound_s, least_s), tokens_min) for bound_s, tokens_min in bounds]


def pays_longer_chunk(step_s: Callable[[int], float], tokens: int, more_tokens: int, bound_s: float) -> bool:
    """Return whether a longer chunk halves the time per token, in a step that takes little more than its bound.

    Why: after a long prefix, a chunk of 16 tokens may cost as much as one of 64, so that four times as many steps are
    beyond the TPOT.
    """
    alone_s, longer_s = step_s(0), step_s(more_tokens)
    if longer_s > SHORT_CHUNK_RATIO * bound_s:
        return False
    return 2 * (longer_s - alone_s) * tokens <= (step_s(tokens) - alone_s) * more_tokens


def _largest(low: int, high: int, takes_s: Callable[[int], float], bound_s: float) -> int:
    """Return the largest number of tokens that takes at most `bound_s`, at least `low` and at most `high`."""
    if low >= high:
        return high
    middle = high  # in most steps everything fits, so the binary search starts with the maximum
    while low < high:
        low, high = (middle, high) if takes_s(middle) <= bound_s else (low, middle - 1)
        middle = (low + high + 1) // 2
    return low


def _split(candidates: Sequence[Candidate]) -> tuple[list[int], Chosen]:
    """Return the indices of decoding candidates, and (index, prompt tokens that fit) of the others. Oldest first."""
    decoding: list[int] = []
    prompts: Chosen = []
    for index, candidate in enumerate(candidates):
        remaining_tokens = candidate.remaining_tokens
        if remaining_tokens == 1:
            decoding.append(index)
        elif remaining_tokens > 1:
            prompts.append((index, min(remaining_tokens, candidate.room_tokens)))
    return decoding, prompts


def _decodes(
    candidates: Sequence[Candidate], decoding: Sequence[int], limits: BatchLimits, *, keeps_place: bool = False
) -> Chosen:
    """Return one token for each decoding candidate with room, oldest first. If they are too many, they take turns.

    `keeps_place`: leave a place to a prompt if decodes would fill the step, so that a preempted request continues.
    """
    found = [index for index in decoding if candidates[index].room_tokens > 0]
    places = min(limits.requests_max, limits.step_tokens_max)
    if keeps_place and len(found) >= places:
        places = max(1, places - 1)
    if len(found) > places:
        found = _in_turns(candidates, found)[:places]  # their order decides which are left out next
    return [(index, 1) for index in found]


def _in_turns(candidates: Sequence[Candidate], decoding: Sequence[int]) -> list[int]:
    """Return decoding candidates in the order of their turns: one request of each client before a second one of any.

    Why: handed-off requests can exceed the places of a step. No stream may stand still until another one ends, and a
    client with many streams must not slow down those of others. The requests of a client are served round-robin.
    """
    by_turn = sorted(decoding, key=lambda index: candidates[index].last_turn)
    ranks: list[int] = []
    clients: Counter[int] = Counter()
    for index in by_turn:
        client = candidates[index].client
        ranks.append(clients[client])
        clients[client] += 1
    return [index for _, index in sorted(zip(ranks, by_turn, strict=True), key=itemgetter(0))]


def _chunks(prompts: Chosen, limits: BatchLimits, *, requests: int, tokens: int) -> Chosen:
    """Distribute `tokens` over the prompts, oldest first. `requests`: places of the batch that are taken already."""
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
    """Return the shape of a step: the decodes of `base` and these chunks of prompts."""
    return StepShape(
        prefill_tokens=sum(count for _, count in chunks),
        prefill_chunks=len(chunks),
        prefill_pairs=sum(prefill_pairs(count, candidates[index].computed_tokens) for index, count in chunks),
        decode_requests=base.decode_requests,
        context_tokens=base.context_tokens,
    )
