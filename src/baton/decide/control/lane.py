"""One request inside a batcher: its tokens, computed tokens, block table, and drafts of its next tokens."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from msgspec.structs import replace

from baton.core.config import BatchLimits, SpeculationConfig
from baton.core.report_parts import AnswerPace
from baton.core.spill import spilled_blocks
from baton.core.step import LayerStream, Step
from baton.core.types import (
    BlockHash,
    BlockId,
    FinishReason,
    Request,
    RequestId,
    TokenLogprob,
    Until,
    prefill_pairs,
)
from baton.decide.control.drafting import Drafter, worth_count
from baton.decide.cost.online import StepLearner
from baton.decide.kv.hashing import block_hash, hashes_per_block, root_hash
from baton.decide.policy.batching import PACE_RATIO


@dataclass(slots=True)
class StepClock:
    """The time at which a batcher plans a step, for its lanes."""

    now_s: float = 0.0
    begun: list[Lane] = field(default_factory=list["Lane"])
    """Lanes with output whose first decode step on this worker is not planned yet."""

    def advance(self, now_s: float) -> None:
        """Set the time. The lanes that have begun are paced from now on.

        An answer that was handed off starts one token behind, for the time of the handoff.
        """
        self.now_s = now_s
        for lane in self.begun:
            lane.paced = (now_s, lane.output_tokens + (not lane.started))
        self.begun.clear()


LaneState = Literal["waiting", "asking", "ready"]
"""waiting: has no blocks and has not asked. asking: waits for the pool's answer. ready: has blocks."""
STEP_TOKENS_MIN = 16
"""Minimum prompt tokens of a step that is shortened for a more urgent class."""
LOOKAHEAD_TOKENS = 4
"""A decoding request asks for blocks this many tokens before it needs them, so that the answer is in time."""


@dataclass(slots=True, eq=False)
class Lane:
    """A request in a batcher. It has no prefill or decode phase, only known tokens and computed tokens."""

    request: Request
    attempt: int
    tokens: array[int]
    """Prompt and output, as `unpack_tokens` gives them."""
    until: Until
    block_tokens: int
    key: tuple[float, ...]
    """Order among waiting lanes."""
    state: LaneState = "waiting"
    table: tuple[BlockId, ...] = ()
    computed_tokens: int = 0
    sealed_blocks: int = 0
    asked_blocks: int = 0
    grow_at_tokens: int = 0
    """Length in tokens at which it asks for more blocks. Set by `expect`."""
    started: bool = False
    last_turn: int = 0
    """Sequence number of its last slice on this worker. 0: it had none."""
    hash_runs: int = 1
    """Number of hashes per block; see `hashes_per_block`."""
    hashes: list[BlockHash] = field(default_factory=list[BlockHash])
    """Hashes of `tokens`, `hash_runs` per full block, computed on demand."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    stream: LayerStream | None = None
    """Layer streaming of the last chunk; see `Slice.stream`."""
    drafter: Drafter | None = None
    """Created with the first draft."""
    clock: StepClock = field(default_factory=StepClock)
    """The clock of the batcher."""
    paced: tuple[float, int] | None = None
    """Time from which, and output tokens after which, `ahead_s` counts. None until its first decode step is planned."""
    repeated_token: array[int] | None = None
    """Simulation only: an array with the one token that every step but the last samples."""
    tokens_max: int = field(init=False)
    """Maximum length in tokens. The last output token is never computed, but its room is counted."""

    def __post_init__(self) -> None:
        self.tokens_max = self.request.prompt_tokens + self.request.output_tokens_max

    @property
    def remaining_tokens(self) -> int:
        """Known tokens that are not computed yet, except the last prompt token if the decode worker computes it."""
        return len(self.tokens) - self.computed_tokens - (self.until == "prompt")

    @property
    def is_left(self) -> bool:
        """True if this worker has computed all that it was asked for, and the decode worker samples the first token."""
        return self.until == "prompt" and self.remaining_tokens == 0

    @property
    def room_tokens(self) -> int:
        return len(self.table) * self.block_tokens - self.computed_tokens

    @property
    def spilled_tokens(self) -> int:
        """Leading tokens whose KV is in the spill space."""
        return spilled_blocks(self.table) * self.block_tokens

    @property
    def client(self) -> int:
        return self.request.client

    @property
    def tpot_s(self) -> float | None:
        return None if self.request.slo is None else self.request.slo.tpot_s

    @property
    def ahead_s(self) -> float:
        """Seconds by which its newest token on this worker came before its pace requires it. Negative: late."""
        if self.request.slo is None or self.paced is None:
            return 0.0
        since_s, tokens = self.paced
        return (self.output_tokens - tokens) * PACE_RATIO * self.request.slo.tpot_s - (self.clock.now_s - since_s)

    @property
    def ttft_s(self) -> float | None:
        return None if self.request.slo is None else self.request.slo.ttft_s

    @property
    def urgent_ttft_s(self) -> float | None:
        return None if self.request.service is None else self.request.service.urgent_ttft_s

    @property
    def step_ratio(self) -> float:
        """The share of a step's tokens, 0..1, that the prompt may take; the class of the request sets it."""
        return 1.0 if self.request.service is None else self.request.service.step_ratio

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.request.prompt_tokens

    def prefix(self) -> tuple[BlockHash, ...]:
        """Return the hashes that may be used as a prefix hit. The last token of a prompt must always be computed."""
        if not self.request.shares_blocks:
            return ()
        if self.request.sampling.prompt_logprobs and self.output_tokens == 0:
            return ()
        return self._block_hashes(len(self.tokens) - 1)

    def blocks_for(self, tokens: int) -> int:
        return -(-min(tokens, self.tokens_max) // self.block_tokens)

    def expect(self, blocks: int) -> None:
        """Record the number of blocks that it has or has asked for, and when it must ask for more."""
        self.asked_blocks = blocks
        room_tokens = blocks * self.block_tokens
        enough = room_tokens >= self.tokens_max
        self.grow_at_tokens = (self.tokens_max if enough else room_tokens - LOOKAHEAD_TOKENS) + 1

    def hold(self, table: Sequence[BlockId], computed_tokens: int) -> None:
        """Take a block table whose first `computed_tokens` tokens have KV."""
        self.table = tuple(table)
        self.computed_tokens = min(computed_tokens, len(self.tokens) - 1)
        self.sealed_blocks = computed_tokens // self.block_tokens
        self.expect(len(table))
        self.state = "ready"
        if self.output_tokens and self.paced is None:
            self.clock.begun.append(self)

    def empty(self) -> None:
        """Drop the blocks after a preemption: tokens are computed again or found in the cache."""
        self.table = ()
        self.computed_tokens = self.sealed_blocks = self.asked_blocks = 0
        self.prompt_logprobs = ()
        self.state = "waiting"

    def seal(self) -> tuple[int, tuple[BlockHash, ...]]:
        """Seal the blocks that have become full. Return the index of the first one and the hashes of all."""
        full = self.computed_tokens >= (self.sealed_blocks + 1) * self.block_tokens
        if not full or not self.request.shares_blocks:
            return self.sealed_blocks, ()
        first, hashes = self.sealed_blocks, self._block_hashes(self.computed_tokens)
        self.sealed_blocks = len(hashes)
        return first, hashes[first:]

    def decode_on(self, steps: int, last: int | None) -> None:
        """Append the tokens of `steps` decode steps, one of `repeated_token` each.

        `last`: the token of the last step, if that step sampled another one.
        """
        assert self.repeated_token is not None, f"the simulator has not set the tokens of {self.request.id}"
        self.computed_tokens += steps
        self.tokens.extend(self.repeated_token * steps)
        if last is not None:
            self.tokens[-1] = last

    def _block_hashes(self, tokens: int) -> tuple[BlockHash, ...]:
        """Return the hashes of the full blocks of the first `tokens` tokens. Hashes are cached."""
        runs = tokens // self.block_tokens * self.hash_runs
        run_tokens = self.block_tokens // self.hash_runs
        while len(self.hashes) < runs:
            start = len(self.hashes) * run_tokens
            parent = self.hashes[-1] if self.hashes else root_hash(self.request.cache_salt)
            self.hashes.append(block_hash(parent, self.tokens[start : start + run_tokens]))
        return hashes_per_block(self.hashes[:runs], self.hash_runs)

    def cached_hashes(self, first: int, end: int | None = None) -> tuple[BlockHash, ...]:
        """Return the cached hashes of blocks [first, end). `end` None: up to the last full block."""
        full = len(self.tokens) // self.block_tokens if end is None else end
        return hashes_per_block(self.hashes[first * self.hash_runs : full * self.hash_runs], self.hash_runs)

    def finish_reason(self) -> FinishReason | None:
        """Return why the newest token ends the request, or None if it does not."""
        if self.tokens[-1] in self.request.sampling.stop_token_ids:
            return "stop"
        return "length" if self.output_tokens >= self.request.output_tokens_max else None

    def is_worth_waiting(self, soon: Set[BlockHash]) -> bool:
        """Return whether to wait for the blocks `soon`, which others compute: a hit on half of the prompt is worth it.

        A hit on the chat template, which all prompts share, is not.
        """
        shared = sum(block_hash in soon for block_hash in self.prefix())
        return 2 * shared * self.block_tokens >= self.remaining_tokens


def share_step(lanes: Sequence[Lane], limits: BatchLimits, *, may_skip: bool) -> tuple[BatchLimits, list[int]]:
    """Return the limits of the next step, and the indices of the lanes that may be in it.

    A running step cannot be interrupted, and a prompt of a more urgent class would wait for its end. So the step is
    shorter if such a class has a reservation, and decodes of other classes skip the step of such a prompt. `may_skip`:
    False after a step that they skipped, so that a class full of prompts does not starve them.
    """
    most, prompts = limits.step_tokens_max, [lane for lane in lanes if lane.remaining_tokens > 1]
    tokens, urgent_tokens = STEP_TOKENS_MIN, 0
    for lane in sorted(prompts, key=lambda lane: -lane.step_ratio):
        urgent_tokens += lane.remaining_tokens
        tokens = max(tokens, min(int(lane.step_ratio * most), urgent_tokens))
    urgent_ratio = max((lane.step_ratio for lane in prompts), default=0.0) if may_skip else 0.0
    places = [place for place, lane in enumerate(lanes) if lane.remaining_tokens > 1 or lane.step_ratio >= urgent_ratio]
    return replace(limits, step_tokens_max=min(most, len(places) - len(prompts) + tokens)), places


def in_order(lane: Lane) -> tuple[tuple[float, ...], RequestId]:
    """Return the sort key of a lane: the fairness key, then the id."""
    return (lane.key, lane.request.id)


def load_of(lanes: Iterable[Lane]) -> tuple[int, int, int, float, AnswerPace | None]:
    """Return (queued prompt tokens, queued requests, context tokens, queued pairs, pace) of some lanes.

    Queued tokens are not computed yet, a queued request has some of them, and context tokens have KV.
    """
    queued_tokens = queued_requests = context_tokens = 0
    pairs, tpot_s, ahead_s = 0.0, inf, inf
    for lane in lanes:
        remaining_tokens = len(lane.tokens) - lane.computed_tokens
        if remaining_tokens > 1:
            queued_tokens += remaining_tokens
            queued_requests += 1
            pairs += prefill_pairs(remaining_tokens, lane.computed_tokens)
        elif lane.request.slo is not None:
            tpot_s, ahead_s = min(tpot_s, PACE_RATIO * lane.request.slo.tpot_s), min(ahead_s, lane.ahead_s)
        context_tokens += lane.computed_tokens  # 0 in a waiting lane
    pace = AnswerPace(tpot_s, ahead_s) if tpot_s < inf else None
    return queued_tokens, queued_requests, context_tokens, pairs, pace


def with_drafts(
    lanes: Sequence[Lane], step: Step, limits: BatchLimits, config: SpeculationConfig, learner: StepLearner
) -> Step:
    """Return a step with drafts for its decoding lanes: as many tokens as raise the expected tokens per second.

    `lanes`: the lane of each slice of `step`. No drafts if more than `config.requests_max` lanes decode, or one with
    an SLO: predicted errors of a TPOT with drafts are wrong once there are too many requests for drafts.
    """
    if not config.tokens_max:
        return step
    decoding = [index for index, part in enumerate(step.slices) if part.sample and part.count == 1]
    if not 0 < len(decoding) <= config.requests_max:
        return step
    if not config.with_slo and any(lanes[index].request.slo for index in decoding):
        return step
    spare_tokens = limits.step_tokens_max - step.tokens
    guesses: dict[int, list[int]] = {}
    for index in decoding:
        lane = lanes[index]
        most = min(spare_tokens, lane.room_tokens - 1, lane.tokens_max - len(lane.tokens) - 1)
        if lane.until == "end" and most > 0 and not lane.spilled_tokens:
            lane.drafter = lane.drafter or Drafter(config)
            if guess := lane.drafter.guess(lane.tokens, most, lane.request.sampling.stop_token_ids):
                guesses[index] = guess
    if not guesses:
        return step
    gains = [(gain, index) for index, guess in guesses.items() for gain in _drafter(lanes[index]).gains(len(guess))]
    gains.sort(reverse=True)
    times_s = learner.grown_s(step.shape, min(len(gains), spare_tokens))
    lengths = Counter(index for _, index in gains[: worth_count(len(decoding), [gain for gain, _ in gains], times_s)])
    for index in guesses.keys() - lengths.keys():
        _drafter(lanes[index]).skip()
    drafts = {index: guesses[index][:length] for index, length in lengths.items()}
    return Step(tuple(part.with_drafts(drafts.get(index, ())) for index, part in enumerate(step.slices)))


def _drafter(lane: Lane) -> Drafter:
    assert lane.drafter is not None, f"{lane.request.id} has no drafter"
    return lane.drafter
