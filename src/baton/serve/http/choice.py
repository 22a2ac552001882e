"""Turn the tokens of a request into the text of one choice: decoding, stop strings, filters, tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.compute.models.tokenizer import StreamDecoder, Tokenizer
from baton.core.types import FinishReason, OutputToken, TokenLogprob
from baton.serve.http.prompts import Echo, Prompt
from baton.serve.http.reasoning import ReasoningSplitter
from baton.serve.http.stop_scanner import StopScanner
from baton.serve.http.tools.parser import CallPart, ToolParser
from baton.serve.http.wire.errors import finish_error
from baton.serve.http.wire.responses import ChatFinish, Usage
from baton.serve.live.hooks import Filters
from baton.serve.live.live_request import Finish, LiveRequest, Update


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token of a choice for which the client wants log probabilities."""

    token: int
    offset: int
    """Position in the choice's text, in characters."""
    logprob: TokenLogprob | None
    """Log probability of the token. None: the first token of an echoed prompt has none."""


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """The text, token entries and tool calls of a choice that can be sent now. False if there are none."""

    text: str
    entries: tuple[TokenEntry, ...] = ()
    calls: tuple[CallPart, ...] = ()
    reasoning: str = ""
    """New text of the model's reasoning."""
    token_ids: tuple[int, ...] | None = None
    """New output tokens. None: the client does not want them."""
    prompt_token_ids: Sequence[int] | None = None
    """Tokens of the prompt, with the first output token if the client wants them."""
    usage: Usage | None = None
    """Usage of the request so far. None: the client does not want it in every chunk."""

    @property
    def continued_calls(self) -> tuple[CallPart, ...]:
        """Return the part that goes on with a call of an earlier delta, if any. It precedes the text."""
        return tuple(part for part in self.calls[:1] if part.id is None)

    def __bool__(self) -> bool:
        return bool(self.text or self.entries or self.calls or self.reasoning or self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """The parameters that turn the tokens of a choice into text."""

    tokenizer: Tokenizer
    stop_strings: Sequence[str]
    stop_token_ids: frozenset[int]
    tokens_min: int
    """Number of output tokens before which stop strings are ignored."""
    tokens_max: int
    """Maximum output tokens in the text. 0: the response is only the echo of the prompt."""
    with_logprobs: bool
    with_token_ids: bool = False
    follows_text: bool
    """Whether the output continues the prompt's text (completion) instead of starting a new text (chat)."""
    shown_tokens: frozenset[int] = frozenset()
    """Special tokens that are part of the text: the marks of tool calls."""
    skip_special: bool = True
    """Leave all other special tokens out of the text."""
    keep_stop_string: bool = False
    """The text ends with the stop string that it reached."""


@dataclass(slots=True)
class ChoiceText:
    """The state of one choice while its tokens arrive."""

    index: int
    prompt_index: int
    prompt: Prompt
    live: LiveRequest
    rules: TextRules
    filters: Filters
    calls: ToolParser | None = None
    """Separates tool calls from the text. None: the request has no tools."""
    reasoning: ReasoningSplitter | None = None
    """Separates reasoning from the text. None: the model does not reason, or the route does not separate it."""
    finish_reason: FinishReason | None = None
    output_tokens: int = 0
    is_cut_short: bool = False
    """A stop string, or the last tool call that the client allows, has ended the choice; the worker must be told."""
    unsent_tokens: int = 0
    """Tokens that were added since the last call of `take_unsent_tokens`."""
    _had_tokens: bool = False
    _token_ids: list[int] = field(default_factory=list)
    """Output tokens that no delta has had yet, if the client wants them."""
    _echo: Echo | None = field(init=False)
    """Echo of the prompt. None: there is no echo, or it was sent."""
    _decoder: StreamDecoder = field(init=False)
    _scanner: StopScanner = field(init=False)
    _entries: list[TokenEntry] = field(default_factory=list)
    """Entries whose text is not released yet."""
    _decoded_characters: int = 0
    _released_characters: int = 0
    """Counted before the output filters, so that the offsets of tokens do not depend on filters."""

    def __post_init__(self) -> None:
        self._echo = self.prompt.echo
        rules = self.rules
        self._decoder = StreamDecoder(
            rules.tokenizer,
            skip_special=rules.skip_special,
            follows_text=rules.follows_text,
            shown=rules.shown_tokens,
        )
        self._scanner = StopScanner(rules.stop_strings, keeps_stop=rules.keep_stop_string)

    def apply(self, update: Update) -> ChoiceDelta:
        """Return the output that can be sent to the client after an update. Raises RequestError if the request failed.

        Sets `finish_reason` when the choice ends. A stop string can end it before the worker reports the end.
        """
        before, entries = self._take_echo(update) if self._echo and update.tokens else ("", ())
        text = "".join([self._take_token(token) for token in update.tokens if self.finish_reason is None])
        if self.finish_reason is None and update.finish is not None:
            text += self._take_finish(update.finish)
        text = self.filters.push(text)
        if self.finish_reason is not None:
            text += self.filters.flush()
        reasoning, text = self._take_reasoning(text)
        text, calls = self._take_calls(text)
        is_first = self.output_tokens > 0 and not self._had_tokens
        self._had_tokens = self.output_tokens > 0
        wants_ids, ids, self._token_ids = self.rules.with_token_ids, self._token_ids, []
        return ChoiceDelta(
            before + text,
            (*entries, *self._released_entries()),
            calls,
            reasoning,
            tuple(ids) if wants_ids else None,
            self.prompt.tokens if wants_ids and is_first else None,
        )

    def replay(self, tokens: Sequence[int]) -> None:
        """Set the state of the choice to that after `tokens`, whose text the client received before a restart."""
        request_id = self.live.request.id
        self.apply(Update(tokens=tuple(OutputToken(request_id, 1, index, token) for index, token in enumerate(tokens))))
        self.take_unsent_tokens()

    @property
    def chat_finish(self) -> ChatFinish | None:
        """The finish reason of a chat: `finish_reason`, or `tool_calls`."""
        called = self.calls is not None and self.calls.calls > 0
        return "tool_calls" if called and self.finish_reason == "stop" else self.finish_reason

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text. None: no stop string did."""
        return self._scanner.found or None

    def _take_reasoning(self, text: str) -> tuple[str, str]:
        """Separate reasoning from text."""
        if self.reasoning is None:
            return "", text
        reasoning, text = self.reasoning.push(text)
        if self.finish_reason is None:
            return reasoning, text
        rest = self.reasoning.flush()
        return reasoning + rest[0], text + rest[1]

    def _take_calls(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        """Separate tool calls from text. End the choice after the last call that the client allows."""
        if self.calls is None:
            return text, ()
        parsed = self.calls.push(text)
        if self.finish_reason is None:
            if self.calls.is_full:
                self._end_here("stop")
            return parsed.text, parsed.parts
        rest = self.calls.flush()
        return parsed.text + rest.text, (*parsed.parts, *rest.parts)

    def take_unsent_tokens(self) -> int:
        """Return how many tokens were added since the last call. Call it when their text has reached the client."""
        tokens, self.unsent_tokens = self.unsent_tokens, 0
        return tokens

    def _take_token(self, token: OutputToken) -> str:
        self.unsent_tokens += 1
        if self.output_tokens >= self.rules.tokens_max:
            self._end_here("length")
            return ""
        self.output_tokens += 1
        if self.rules.with_token_ids:
            self._token_ids.append(token.token)
        if token.token in self.rules.stop_token_ids:
            return ""  # the stop token ends the request, and is not part of the text
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
        self.finish_reason, self.is_cut_short = reason, True

    def _take_finish(self, finish: Finish) -> str:
        if finish.outcome != "finished" or finish.reason is None:
            raise finish_error(finish)
        text = self._scan(self._decoder.flush())
        if self._scanner.stopped:
            return text
        rest = self._scanner.flush()
        self._released_characters += len(rest)
        self.finish_reason = finish.reason
        return text + rest

    def _released_entries(self) -> tuple[TokenEntry, ...]:
        """Remove and return the entries of tokens whose first character was released to the client.

        After the last token, all entries are returned, unless a stop string has cut the text.
        """
        if not self._entries:
            return ()
        all_out = self.finish_reason is not None and not self._scanner.stopped
        count = 0
        while count < len(self._entries) and (all_out or self._entries[count].offset < self._released_characters):
            count += 1
        released, self._entries = tuple(self._entries[:count]), self._entries[count:]
        return released

    def _take_echo(self, update: Update) -> tuple[str, tuple[TokenEntry, ...]]:
        """Return the echo of the prompt, which precedes the first token. Call it once."""
        echo, self._echo = self._echo, None
        assert echo is not None, "the echo was taken twice"
        self._decoded_characters = self._released_characters = len(echo.text)
        if not self.rules.with_logprobs:
            return echo.text, ()
        logprobs = (None, *update.tokens[0].prompt_logprobs)
        shown = zip(self.prompt.tokens, echo.offsets, logprobs, strict=True)
        return echo.text, tuple(TokenEntry(token, offset, logprob) for token, offset, logprob in shown)
