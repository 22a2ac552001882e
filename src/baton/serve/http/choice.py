"""One choice of an answer: from the tokens of a generation to the text that its client sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.compute.models.tokenizer import StreamDecoder, Tokenizer
from baton.core.types import FinishReason, OutputToken, TokenLogprob
from baton.serve.http.prompts import Echo, Prompt
from baton.serve.http.text import StopScanner
from baton.serve.http.tools.parser import CallPart, ToolParser
from baton.serve.http.wire.errors import refusal
from baton.serve.http.wire.responses import ChatFinish
from baton.serve.live.hooks import Filters
from baton.serve.live.port import Finish, Generation, Update


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token of a choice whose log probabilities were asked for."""

    token: int
    offset: int
    """Characters of the choice's text that stand before it."""
    logprob: TokenLogprob | None
    """None for the first token of an echoed prompt: nothing precedes it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new in a choice."""

    text: str
    entries: tuple[TokenEntry, ...] = ()
    calls: tuple[CallPart, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.entries or self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How the tokens of a choice become text."""

    tokenizer: Tokenizer
    stop_strings: Sequence[str]
    stop_token_ids: frozenset[int]
    tokens_min: int
    """Stop strings are looked for from this output token on."""
    tokens_max: int
    """Output tokens that are shown. 0: an echo of the prompt, and nothing else."""
    with_logprobs: bool
    follows_text: bool
    """The answer goes on from the prompt's text (a completion), instead of starting its own (a chat)."""
    shown_tokens: frozenset[int] = frozenset()
    """Special tokens that are text here: the marks of tool calls."""


@dataclass(slots=True)
class Choice:
    """The state of one choice while its tokens come."""

    index: int
    prompt_index: int
    prompt: Prompt
    generation: Generation
    rules: TextRules
    filters: Filters
    calls: ToolParser | None = None
    """Reads tool calls out of the text. None: it has none."""
    finish_reason: FinishReason | None = None
    output_tokens: int = 0
    _unsent_tokens: int = 0
    _echo: Echo | None = field(init=False)
    """What is still to be shown of the prompt."""
    _decoder: StreamDecoder = field(init=False)
    _scanner: StopScanner = field(init=False)
    _entries: list[TokenEntry] = field(default_factory=list)
    """Those whose text is not out yet."""
    _decoded_characters: int = 0
    _released_characters: int = 0
    """Before the filters, so that offsets do not depend on them."""

    def __post_init__(self) -> None:
        self._echo = self.prompt.echo
        self._decoder = StreamDecoder(
            self.rules.tokenizer, follows_text=self.rules.follows_text, shown=self.rules.shown_tokens
        )
        self._scanner = StopScanner(self.rules.stop_strings)

    def take(self, update: Update) -> Piece:
        """Turn news into what the client may see now. Raises RequestError if the generation ended badly.

        Sets `finish_reason` when the choice is over, which a stop string may bring about before the generation ends.
        """
        before, entries = self._take_echo(update) if self._echo and update.tokens else ("", ())
        text = "".join([self._take_token(token) for token in update.tokens if self.finish_reason is None])
        if self.finish_reason is None and update.finish is not None:
            text += self._take_finish(update.finish)
        text = self.filters.push(text)
        if self.finish_reason is not None:
            text += self.filters.flush()
        text, calls = self._take_calls(text)
        return Piece(before + text, (*entries, *self._released_entries()), calls)

    @property
    def ending(self) -> ChatFinish | None:
        """How the choice ended, as its client is told."""
        called = self.calls is not None and self.calls.calls > 0
        return "tool_calls" if called and self.finish_reason == "stop" else self.finish_reason

    def _take_calls(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        """Tell calls from text. With the last call that the client wants, the choice is over."""
        if self.calls is None:
            return text, ()
        parsed = self.calls.push(text)
        if self.finish_reason is None:
            if self.calls.is_full:
                self._end_here("stop")
            return parsed.text, parsed.parts
        rest = self.calls.flush()
        return parsed.text + rest.text, (*parsed.parts, *rest.parts)

    def mark_sent(self) -> None:
        """Note that the text of all tokens so far reached the client."""
        if self._unsent_tokens:
            self.generation.mark_sent(self._unsent_tokens)
            self._unsent_tokens = 0

    def _take_token(self, token: OutputToken) -> str:
        self._unsent_tokens += 1
        if self.output_tokens >= self.rules.tokens_max:
            self._end_here("length")
            return ""
        self.output_tokens += 1
        if token.token in self.rules.stop_token_ids:
            return ""  # the generation ends with it, and it is no part of the text
        text = self._decoder.push(token.token)
        if self.rules.with_logprobs:
            self._entries.append(TokenEntry(token.token, self._decoded_characters, token.logprob))
        self._decoded_characters += len(text)
        return self._scan(text)

    def _scan(self, text: str) -> str:
        if self.output_tokens < self.rules.tokens_min:
            self._released_characters += len(text)
            return text
        text = self._scanner.push(text)
        self._released_characters += len(text)
        if self._scanner.stopped:
            self._end_here("stop")
        return text

    def _end_here(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.generation.stop()

    def _take_finish(self, finish: Finish) -> str:
        if finish.outcome != "finished" or finish.reason is None:
            raise refusal(finish)
        text = self._scan(self._decoder.flush())
        if self._scanner.stopped:
            return text
        rest = self._scanner.flush()
        self._released_characters += len(rest)
        self.finish_reason = finish.reason
        return text + rest

    def _released_entries(self) -> tuple[TokenEntry, ...]:
        """Take the entries whose text began to come out; at the end all, but those that a stop string cut off."""
        if not self._entries:
            return ()
        all_out = self.finish_reason is not None and not self._scanner.stopped
        count = 0
        while count < len(self._entries) and (all_out or self._entries[count].offset < self._released_characters):
            count += 1
        released, self._entries = tuple(self._entries[:count]), self._entries[count:]
        return released

    def _take_echo(self, update: Update) -> tuple[str, tuple[TokenEntry, ...]]:
        """Show the prompt once, before the first token."""
        echo, self._echo = self._echo, None
        assert echo is not None, "the echo is shown once"
        self._decoded_characters = self._released_characters = len(echo.text)
        if not self.rules.with_logprobs:
            return echo.text, ()
        logprobs = (None, *update.tokens[0].prompt_logprobs)
        shown = zip(self.prompt.tokens, echo.offsets, logprobs, strict=True)
        return echo.text, tuple(TokenEntry(token, offset, logprob) for token, offset, logprob in shown)
