"""Input and result of one step.

They stay in one process, but are structs: every request of every step needs a slice and a result, and a frozen
dataclass takes several times as long to create.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from baton.core.types import BlockId, RequestId, Sampling, StepShape, TokenLogprob, prefill_pairs


class AllowedTokens(Protocol):
    """The tokens that a grammar allows next. Computed in parallel to the step."""

    def rows(self) -> Sequence[bytes]:
        """Return one row per sampled token of the slice: one bit per token id, the lowest bit of each byte first.

        If there are fewer rows than tokens, the grammar does not allow the drafts after them. If there is no row, no
        token may be sampled: the masks are late, or the request fails.
        """
        ...


@dataclass(frozen=True, slots=True)
class AllowedTokensRow:
    """One row of another `AllowedTokens`, for a slice that samples at a single draft position."""

    allowed: AllowedTokens
    index: int

    def rows(self) -> Sequence[bytes]:
        return self.allowed.rows()[self.index : self.index + 1]


@dataclass(frozen=True, slots=True)
class LayerStream:
    """Streaming of the KV of a prompt's last chunk during its step."""

    attempt: int
    groups: int
    """Number of layer groups in which the KV is sent."""


class Slice(Struct, frozen=True, kw_only=True, gc=False):
    """`count` tokens of one request in one step: many during its prompt, one while it decodes."""

    request_id: RequestId
    tokens: Sequence[int]
    """Every token of the request so far, prompt and output. Shared with the batcher: read, never write."""
    start: int
    """Number of tokens whose KV is in the block table. The first token of this slice is `tokens[start]`."""
    count: int
    block_table: Sequence[BlockId]
    """The KV of token i is in block `block_table[i // block_tokens]`, slot `i % block_tokens`."""
    sample: bool
    """True if this slice ends with the last known token, so that the next one is sampled."""
    sampling: Sampling
    prompt_tokens: int
    allowed: AllowedTokens | None = None
    """Set by `baton.compute.constrained` if the request has a grammar. None: all tokens."""
    drafts: int = 0
    """Number of drafted tokens at the end of the slice. A token is sampled at each draft and after the last one, until
    one differs from its draft."""
    spilled_tokens: int = 0
    """Leading tokens whose KV is in the spill space."""
    stream: LayerStream | None = None
    """Set if the engine reports finished layers of the last chunk of the prompt."""

    def bad_tokens(self) -> list[int]:
        """Return the tokens that would complete a bad word of the request."""
        words = self.sampling.bad_words
        if not words:
            return []
        output = self.tokens[self.prompt_tokens : self.start + self.count]
        return [word[-1] for word in words if len(word) == 1 or tuple(output[1 - len(word) :]) == word[:-1]]

    def with_drafts(self, drafts: Sequence[int]) -> Slice:
        """Return the slice with drafted tokens after its own."""
        if not drafts:
            return self
        return replace(self, tokens=[*self.tokens, *drafts], count=self.count + len(drafts), drafts=len(drafts))

    def at(self, draft: int) -> Slice:
        """Return the slice with only its first `draft` drafts (0 .. drafts)."""
        if self.drafts == 0:
            return self
        allowed = None if self.allowed is None else AllowedTokensRow(self.allowed, draft)
        return replace(self, count=self.count - self.drafts + draft, drafts=0, allowed=allowed)


class Step(Struct, frozen=True, gc=False):
    """One forward pass over slices of different requests, without padding."""

    slices: tuple[Slice, ...]

    @property
    def tokens(self) -> int:
        return sum(part.count for part in self.slices)

    @property
    def streamed(self) -> tuple[tuple[RequestId, int], ...]:
        """Requests (with attempts) whose prompt ends in this step and whose KV is streamed by layer."""
        return tuple((part.request_id, stream.attempt) for part, stream in self._streamed)

    def layer_ends(self, layers: int) -> list[int]:
        """Return the number of finished layers at the end of each layer group. Earlier groups take the remainder."""
        groups = min(layers, max((stream.groups for _, stream in self._streamed), default=1))
        size, more = divmod(layers, groups)
        return [group * size + min(group, more) for group in range(1, groups + 1)]

    @property
    def _streamed(self) -> list[tuple[Slice, LayerStream]]:
        return [(part, part.stream) for part in self.slices if part.stream is not None and part.sample]

    @property
    def shape(self) -> StepShape:
        """The sums over the step that cost models use."""
        prefill_tokens = chunks = decodes = context_tokens = spilled_tokens = 0
        pairs = 0.0
        for part in self.slices:
            spilled_tokens += part.spilled_tokens
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
            spilled_tokens=spilled_tokens,
        )


EMPTY_STEP = Step(())
"""A step without slices: there is no work."""


class SliceResult(Struct, frozen=True, kw_only=True, gc=False):
    """The result of one slice."""

    token: int | None = None
    """The sampled token, if `Slice.sample` is set. None then means that the grammar's masks are late: sample again."""
    failure: str = ""
    """The reason why only this request cannot be computed. Empty: it can."""
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """If requested: the log probabilities of the prompt tokens among start+1 .. start+count, in order."""
    embedding: bytes = b""
    """If requested, together with `token`: see `OutputToken.embedding`."""
    further: tuple[tuple[int, TokenLogprob | None], ...] = ()
    """The tokens sampled after `token`, one per accepted draft."""


class StepResult(Struct, frozen=True, gc=False):
    """One result per slice, in the step's order."""

    slices: Sequence[SliceResult] = ()
