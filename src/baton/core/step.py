"""What one forward pass is given and what it gives back.

Lives in one process. Structs all the same: there is a slice and a result for every request of every step, and a frozen
dataclass takes several times as long to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from baton.core.types import BlockId, RequestId, Sampling, StepShape, TokenLogprob, prefill_pairs


class AllowedTokens(Protocol):
    """What a grammar lets through next. Computed beside the step, so that only its slow cases are waited for."""

    def rows(self) -> Sequence[bytes]:
        """Return a row for every token that the slice asks for: one bit per token id, the lowest bit of a byte first.

        Fewer rows than tokens: what follows them is a draft that the grammar does not allow.
        Raises RequestError where the grammar is too complex to go on: then this request fails, and no other.
        """
        ...


@dataclass(frozen=True, slots=True)
class AllowedRow:
    """One of the rows of several tokens."""

    allowed: AllowedTokens
    index: int

    def rows(self) -> Sequence[bytes]:
        return self.allowed.rows()[self.index : self.index + 1]


@dataclass(frozen=True, slots=True)
class LayerStream:
    """The KV of a prompt's last chunk is sent on while it is computed, in so many groups of layers."""

    attempt: int
    groups: int


class Slice(Struct, frozen=True, kw_only=True, gc=False):
    """`count` tokens of one request in one step: many while its prompt is computed, one while it decodes."""

    request_id: RequestId
    tokens: Sequence[int]
    """Every token of the request so far, prompt and output. Shared with the batcher: read, never write."""
    start: int
    """Tokens whose KV the block table already holds; the first token of this slice is `tokens[start]`."""
    count: int
    block_table: Sequence[BlockId]
    """Token i's KV lies in block `block_table[i // block_tokens]`, slot `i % block_tokens`."""
    sample: bool
    """True when this slice reaches the last token: the result then holds the next one."""
    sampling: Sampling
    prompt_tokens: int
    allowed: AllowedTokens | None = None
    """Set where the sampling has a grammar, by `baton.compute.constrained`. None: every token."""
    drafts: int = 0
    """The last so many of its tokens are guesses. A token is drawn before each of them and after the last one, and the
    drawing ends where it differs from the guess."""
    stream: LayerStream | None = None
    """Set where whoever computes the slice that ends the prompt shall tell how many layers of it are done."""

    def at(self, draft: int) -> Slice:
        """Return the slice as it would be if it ended with its first `draft` guesses, 0 .. drafts."""
        if self.drafts == 0:
            return self
        allowed = None if self.allowed is None else AllowedRow(self.allowed, draft)
        return replace(self, count=self.count - self.drafts + draft, drafts=0, allowed=allowed)


class Step(Struct, frozen=True, gc=False):
    """One forward pass: slices of different requests, in one batch, without padding."""

    slices: tuple[Slice, ...]

    @property
    def tokens(self) -> int:
        return sum(part.count for part in self.slices)

    @property
    def streamed(self) -> tuple[tuple[RequestId, int], ...]:
        """Requests whose prompt this step ends and sends on layer by layer, with their attempts."""
        return tuple((part.request_id, stream.attempt) for part, stream in self._streamed)

    def layer_ends(self, layers: int) -> list[int]:
        """List how many of the engine's layers are done where a group of them is: the last group is the smallest."""
        groups = min(layers, max((stream.groups for _, stream in self._streamed), default=1))
        size, more = divmod(layers, groups)
        return [group * size + min(group, more) for group in range(1, groups + 1)]

    @property
    def _streamed(self) -> list[tuple[Slice, LayerStream]]:
        return [(part, part.stream) for part in self.slices if part.stream is not None and part.sample]

    @property
    def shape(self) -> StepShape:
        """Sum up what a cost model looks at."""
        prefill_tokens = chunks = decodes = context_tokens = 0
        pairs = 0.0
        for part in self.slices:
            if part.count == 1 + part.drafts and part.sample:
                decodes += part.count
                context_tokens += part.count * (part.start + part.count)
            else:
                chunks += 1
                prefill_tokens += part.count
                pairs += prefill_pairs(part.count, part.start)
        return StepShape(
            prefill_tokens=prefill_tokens,
            prefill_chunks=chunks,
            prefill_pairs=pairs,
            decode_requests=decodes,
            context_tokens=context_tokens,
        )


EMPTY_STEP = Step(())
"""There is nothing to do now."""


class SliceResult(Struct, frozen=True, kw_only=True, gc=False):
    """What a step found out about one slice."""

    token: int | None = None
    """The next token where the slice asked for one."""
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """If asked for: of tokens start+1 .. start+count (those inside the prompt), in order."""
    embedding: bytes = b""
    """If asked for, with the next token: see `OutputToken.embedding`."""
    further: tuple[tuple[int, TokenLogprob | None], ...] = ()
    """The tokens after the next one, for as long as drafts came true."""


class StepResult(Struct, frozen=True, gc=False):
    """One result per slice, in the step's order."""

    slices: Sequence[SliceResult] = ()
