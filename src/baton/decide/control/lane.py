"""One request inside a batcher: its tokens, how many of them are computed, and where their KV lies."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

from baton.core.config import BatchLimits, SpeculationConfig
from baton.core.step import LayerStream
from baton.core.types import BlockHash, BlockId, FinishReason, Request, RequestId, TokenLogprob, Until
from baton.decide.control.drafts import Drafter
from baton.decide.kv.hashing import block_hash, names_of, root_hash

LaneState = Literal["waiting", "asking", "ready"]
"""waiting: holds no block and has not asked. asking: the pool owes an answer. ready: holds blocks."""
ASKS_AHEAD_MAX = 4
"""Requests that ask for their first blocks at a time where the order of those who wait may change. The pool answers
them by arrival: with many of them and no room, a client who was served less would wait behind all."""
LOOKAHEAD_TOKENS = 4
"""A decoding request asks for more blocks this many tokens before it needs them, so that the answer is never late."""


@dataclass(slots=True, eq=False)
class Lane:
    """There is no prefill and no decode here, only tokens that exist and tokens that are computed."""

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
    """It asks for more blocks once it is this long. See `expect`."""
    started: bool = False
    hash_runs: int = 1
    """Runs that tokens are hashed in, to a block. See `names_of`."""
    hashes: list[BlockHash] = field(default_factory=list[BlockHash])
    """Of the full runs of `tokens`, as far as they were asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    stream: LayerStream | None = None
    """See `Slice.stream`."""
    drafter: Drafter | None = None
    """Set with the first guess."""
    said: array[int] | None = None
    """What it decodes in every step that does not end it, as whoever plays its runs knows: an array of one token."""
    tokens_max: int = field(init=False)
    """Tokens that the request can reach. The last output token is never computed, but its room is counted."""

    def __post_init__(self) -> None:
        self.tokens_max = self.request.prompt_tokens + self.request.output_tokens_max

    @property
    def remaining_tokens(self) -> int:
        """See `Candidate.remaining_tokens`. Where another worker draws the next token, the last one is left to it."""
        return len(self.tokens) - self.computed_tokens - (self.until == "prompt")

    @property
    def is_left(self) -> bool:
        """Another worker draws the next token, and has here all that it needs for that."""
        return self.until == "prompt" and self.remaining_tokens == 0

    @property
    def room_tokens(self) -> int:
        return len(self.table) * self.block_tokens - self.computed_tokens

    @property
    def tpot_s(self) -> float | None:
        return None if self.request.slo is None else self.request.slo.tpot_s

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.request.prompt_tokens

    def prefix(self) -> tuple[BlockHash, ...]:
        """Hashes that may be taken as a hit: never the whole prompt, since the last token must be computed to go on."""
        if not self.request.shares_blocks:
            return ()
        if self.request.sampling.prompt_logprobs and self.output_tokens == 0:
            return ()
        return self._names(len(self.tokens) - 1)

    def blocks_for(self, tokens: int) -> int:
        return -(-min(tokens, self.tokens_max) // self.block_tokens)

    def expect(self, blocks: int) -> None:
        """Note how many blocks it has, or has asked for, and from that when it has to ask for more."""
        self.asked_blocks = blocks
        room_tokens = blocks * self.block_tokens
        enough = room_tokens >= self.tokens_max
        self.grow_at_tokens = (self.tokens_max if enough else room_tokens - LOOKAHEAD_TOKENS) + 1

    def hold(self, table: Sequence[BlockId], computed_tokens: int) -> None:
        """Take over a block table of which `computed_tokens` leading tokens hold KV."""
        self.table = tuple(table)
        self.computed_tokens = min(computed_tokens, len(self.tokens) - 1)
        self.sealed_blocks = computed_tokens // self.block_tokens
        self.expect(len(table))
        self.state = "ready"

    def empty(self) -> None:
        """Forget the blocks: everything has to be computed again, or found again in the cache."""
        self.table = ()
        self.computed_tokens = self.sealed_blocks = self.asked_blocks = 0
        self.prompt_logprobs = ()
        self.state = "waiting"

    def seal(self) -> tuple[int, tuple[BlockHash, ...]]:
        """Name the blocks that have become full. Returns the first one's index and the hashes."""
        full = self.computed_tokens >= (self.sealed_blocks + 1) * self.block_tokens
        if not full or not self.request.shares_blocks:
            return self.sealed_blocks, ()
        first, names = self.sealed_blocks, self._names(self.computed_tokens)
        self.sealed_blocks = len(names)
        return first, names[first:]

    def decode_on(self, steps: int, last: int | None) -> None:
        """Take what so many steps have decoded, one token each. `last`: in place of the last of them."""
        assert self.said is not None, f"nobody knows what {self.request.id} decodes"
        self.computed_tokens += steps
        self.tokens.extend(self.said * steps)
        if last is not None:
            self.tokens[-1] = last

    def _names(self, tokens: int) -> tuple[BlockHash, ...]:
        """Name the full blocks of the first `tokens` tokens; what was named before is not hashed again."""
        runs = tokens // self.block_tokens * self.hash_runs
        run_tokens = self.block_tokens // self.hash_runs
        while len(self.hashes) < runs:
            start = len(self.hashes) * run_tokens
            parent = self.hashes[-1] if self.hashes else root_hash(self.request.cache_salt)
            self.hashes.append(block_hash(parent, self.tokens[start : start + run_tokens]))
        return names_of(self.hashes[:runs], self.hash_runs)

    def known_names(self, first: int, end: int | None = None) -> tuple[BlockHash, ...]:
        """Names of blocks [first, end) as far as they were asked for. None: up to the last full one."""
        full = len(self.tokens) // self.block_tokens if end is None else end
        return names_of(self.hashes[first * self.hash_runs : full * self.hash_runs], self.hash_runs)

    def finish_reason(self) -> FinishReason | None:
        """Tell whether the newest token ends the request."""
        if self.tokens[-1] in self.request.sampling.stop_token_ids:
            return "stop"
        return "length" if self.output_tokens >= self.request.output_tokens_max else None

    def is_worth_waiting(self, soon: Set[BlockHash]) -> bool:
        """Tell whether to wait until `soon` are computed: a hit on half of the prompt is worth a step's delay.

        One on the chat template that all prompts share is not.
        """
        shared = sum(name in soon for name in self.prefix())
        return 2 * shared * self.block_tokens >= self.remaining_tokens


def in_order(lane: Lane) -> tuple[tuple[float, ...], RequestId]:
    """Sort lanes: by fairness's key, then by id."""
    return (lane.key, lane.request.id)


def load_of(lanes: Iterable[Lane]) -> tuple[int, int]:
    """Sum up the prompt tokens that these lanes have yet to compute, and those whose KV they hold."""
    queued_tokens = context_tokens = 0
    for lane in lanes:
        remaining_tokens = len(lane.tokens) - lane.computed_tokens
        if remaining_tokens > 1:
            queued_tokens += remaining_tokens
        context_tokens += lane.computed_tokens  # none in a lane that waits
    return queued_tokens, context_tokens


def drafts_for(
    lanes: Sequence[Lane], chosen: Sequence[tuple[int, int]], limits: BatchLimits, config: SpeculationConfig
) -> dict[int, list[int]]:
    """Guess on for those of a step that decode, as far as the step and their blocks have room. Returns by index.

    `chosen`: (index of the lane, tokens of it). With more than `config.requests_max` of them decoding, none is guessed.
    """
    if config.tokens_max == 0:
        return {}
    decoding = [index for index, count in chosen if count == 1 == lanes[index].remaining_tokens]
    if len(decoding) > config.requests_max:
        return {}
    spare_tokens = limits.step_tokens_max - sum(count for _, count in chosen)
    drafts: dict[int, list[int]] = {}
    for index in decoding:
        lane = lanes[index]
        most = min(spare_tokens, lane.room_tokens - 1, lane.tokens_max - len(lane.tokens) - 1)
        if lane.until == "end" and most > 0:
            lane.drafter = lane.drafter or Drafter(config)
            drafts[index] = lane.drafter.guess(lane.tokens, most, lane.request.sampling.stop_token_ids)
            spare_tokens -= len(drafts[index])
    return drafts
