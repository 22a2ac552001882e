"""What a batcher is driven with: a trivial language model, an arena that knows its slots, and our own books."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

from baton.core.config import BatchLimits
from baton.core.messages import StartRequest, StepReport, WorkerCommand
from baton.core.step import Slice, SliceResult, Step
from baton.core.types import BlockId, HostId, Request, RequestId, TokenLogprob, WorkerId, WorkerView
from baton.decide.control.batcher import Batcher
from baton.decide.cost.linear import LinearCost
from baton.decide.policy.batching import BatcherPolicies, BatchingPolicy, MixedChunked
from baton.decide.policy.fairness import FirstComeFirstServed

BLOCK_TOKENS = 4
STOP = 0


def next_token(tokens: Sequence[int]) -> int:
    """The trivial model: the next token depends on every token before it, and now and then it is the stop token."""
    return crc32(repr(list(tokens)).encode()) % 12


def text_alone(request: Request, prompt: Sequence[int]) -> list[int]:
    """What the request says with nobody else there."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + request.output_tokens_max:
        tokens.append(next_token(tokens))
        if tokens[-1] in request.sampling.stop_token_ids:
            break
    return tokens[len(prompt) :]


class Arena:
    """What lies in each slot of each block: the token and its position. A slot that was never written holds nothing."""

    def __init__(self, window_tokens: int | None = None) -> None:
        """`window_tokens`: how far back a token sees. What lies behind is not looked at."""
        self._window_tokens = window_tokens
        self._slots: dict[tuple[BlockId, int], tuple[int, int] | None] = {}

    def compute(self, part: Slice) -> SliceResult:
        seen_from = 0 if self._window_tokens is None else max(0, part.start - self._window_tokens + 1)
        for position in range(seen_from, part.start):
            assert self._slots.get(self._at(part, position)) == (position, part.tokens[position]), (
                f"{part.request_id}: the KV of token {position} is lost, stale or of somebody else"
            )
        end = part.start + part.count
        for position in range(part.start, end):
            self._slots[self._at(part, position)] = (position, part.tokens[position])
        asked = range(part.start + 1, min(end, part.prompt_tokens - 1) + 1) if part.sampling.prompt_logprobs else ()
        return SliceResult(
            token=next_token(part.tokens[:end]) if part.sample else None,
            prompt_logprobs=tuple(TokenLogprob(part.tokens[position], -1.0) for position in asked),
        )

    def corrupt_kv(self, step: Step) -> None:
        """A process was killed while it wrote."""
        for part in step.slices:
            for position in range(part.start, part.start + part.count):
                self._slots[self._at(part, position)] = None

    def holds(self, block: BlockId, first: int, tokens: Sequence[int]) -> bool:
        held = [self._slots.get((block, slot)) for slot in range(len(tokens))]
        return held == [(first + slot, token) for slot, token in enumerate(tokens)]

    @staticmethod
    def _at(part: Slice, position: int) -> tuple[BlockId, int]:
        return part.block_table[position // BLOCK_TOKENS], position % BLOCK_TOKENS


def new_batcher(
    worker: WorkerId,
    limits: BatchLimits,
    hash_tokens: int | None = None,
    batching: BatchingPolicy = MixedChunked(),  # noqa: B008, it has no state
) -> Batcher:
    return Batcher(
        WorkerView(id=worker, host=HostId("h"), role="mixed"),
        block_tokens=BLOCK_TOKENS,
        limits=limits,
        policies=BatcherPolicies(batching=batching, fairness=FirstComeFirstServed(), cost=LinearCost()),
        hash_tokens=hash_tokens,
    )


@dataclass(slots=True)
class Part:
    """One request as its server sees it: the truth about its tokens."""

    request: Request
    prompt: list[int]
    tokens: list[int]
    attempt: int = 1
    worker: WorkerId | None = None
    closed: bool = False
    sealed_blocks: int = 0
    """Reported as sealed by the present worker, or found when it took the request over."""
    last_start: StartRequest | None = None


@dataclass(slots=True)
class Held:
    """What one worker was told of one request, kept beside the batcher's own books."""

    attempt: int
    table: tuple[BlockId, ...] = ()
    computed_tokens: int = 0


@dataclass(slots=True)
class Process:
    """A batcher with the messages that are under way to it and from it. Nothing overtakes anything."""

    batcher: Batcher
    inbox: list[WorkerCommand] = field(default_factory=list[WorkerCommand])
    outbox: list[StepReport] = field(default_factory=list[StepReport])
    step: Step | None = None
    held: dict[RequestId, Held] = field(default_factory=dict[RequestId, Held])
