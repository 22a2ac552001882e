"""Encode responses: completions, chat completions, and the chunks of their streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from msgspec import UNSET, UnsetType, json
from msgspec.structs import replace

from baton.compute.models.tokenizer import Tokenizer
from baton.core.types import FinishReason
from baton.serve.http.choice import ChoiceDelta, TokenEntry
from baton.serve.http.stored_responses import Conversation
from baton.serve.http.tools.parser import CallPart
from baton.serve.http.wire.responses import (
    FINGERPRINT,
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatFinish,
    ChatLogprob,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FunctionCall,
    ToolCall,
    TopLogprob,
    Usage,
)
from baton.serve.live.live_request import Timings

DONE = b"data: [DONE]\n\n"
_ROLE = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
FINISH_JSON: dict[ChatFinish, bytes] = {"stop": b'"stop"', "length": b'"length"', "tool_calls": b'"tool_calls"'}
LOGPROB_MIN = -9999.0
"""OpenAI's value for the logarithm of 0, because JSON has no infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """The fields that every chunk of a response repeats."""

    id: str
    created: int
    model: str
    prompt_tokens: int = 0
    include_usage: bool
    """Whether a last chunk has the usage. Every other chunk then has `"usage":null`."""


@dataclass(frozen=True, slots=True)
class WholeChoice:
    """A complete choice of a response that is not streamed."""

    index: int
    text: str
    entries: Sequence[TokenEntry]
    finish_reason: FinishReason
    calls: Sequence[CallPart] = ()
    chat_finish: ChatFinish = "stop"
    """Finish reason for chats: `finish_reason`, or `tool_calls`."""
    stop_string: str | None = None
    """The stop string that ended the text. None: no stop string did."""
    reasoning: str = ""
    token_ids: Sequence[int] | None = None
    """Output tokens. None: the client does not want them."""
    prompt_token_ids: Sequence[int] | None = None


class ResponseEncoder(Protocol):
    """Encodes the responses of one route as bytes for the socket."""

    def delta(self, index: int, delta: ChoiceDelta, *, first: bool) -> bytes:
        """Return a chunk with new text of a choice."""
        ...

    def last(
        self,
        index: int,
        finish_reason: ChatFinish,
        timings: Timings,
        *,
        stop_string: str | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """Return the chunk that ends a choice. `usage`: usage so far, if every chunk has it."""
        ...

    def usage(self, usage: Usage, timings: Timings) -> bytes:
        """Return the chunk with the usage, which follows the last choice."""
        ...

    def end(self, usage: Usage, timings: Timings) -> bytes:
        """Return the end of a stream that has no error."""
        ...

    def error(self, body: bytes) -> bytes:
        """Return the event that ends a stream with an error. `body`: OpenAI's error body."""
        ...

    def whole(self, choices: Sequence[WholeChoice], usage: Usage, timings: Timings) -> bytes:
        """Return the body of a response that is not streamed."""
        ...


class ChunkFrame:
    """The constant part of all chunks of a response. It is encoded once, so that a token costs one join of bytes."""

    def __init__(self, head: ResponseHead, kind: str) -> None:
        names = b'"id":%b,"object":%b,"created":%d,"model":%b,"system_fingerprint":%b'
        texts = (json.encode(text) for text in (head.model, FINGERPRINT))
        fields = names % (json.encode(head.id), json.encode(kind), head.created, *texts)
        self._prefix = b"data: {" + fields + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if head.include_usage else b"]}\n\n"

    def chunk(self, choice: bytes, usage: Usage | None = None, further: bytes = b"") -> bytes:
        """Return a chunk around the JSON of a choice. `further`: more fields of the chunk, each after a comma."""
        if usage is None and not further:
            return self._prefix + choice + self._suffix
        end = self._suffix[1:-3] if usage is None else b',"usage":' + json.encode(usage)
        return self._prefix + choice + b"]" + further + end + b"}\n\n"

    def last(self, choice: bytes, timings: Timings, usage: Usage | None) -> bytes:
        """Return a chunk around the JSON of a choice that has ended, with its timings."""
        end = self._suffix[:-3] if usage is None else b'],"usage":' + json.encode(usage)
        return b'%b%b%b,"timings":%b}\n\n' % (self._prefix, choice, end, json.encode(timings))

    def usage(self, usage: Usage, timings: Timings) -> bytes:
        """Return the chunk with the usage, which has no choices."""
        return b'%b],"usage":%b,"timings":%b}\n\n' % (self._prefix, json.encode(usage), json.encode(timings))


def error_event(body: bytes) -> bytes:
    """Return the event of an error in OpenAI's streams."""
    return b"data: " + body + b"\n\n"


def finite(logprob: float) -> float:
    """Return a log probability that JSON can express: at least `LOGPROB_MIN`."""
    return max(logprob, LOGPROB_MIN)


class CompletionEncoder:
    """Encodes `text_completion` objects and their chunks."""

    def __init__(self, head: ResponseHead, tokenizer: Tokenizer, *, top_logprobs: int | None) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._top_logprobs = top_logprobs
        self._frame = ChunkFrame(head, "text_completion")

    def delta(self, index: int, delta: ChoiceDelta, *, first: bool) -> bytes:
        logprobs = b"null" if self._top_logprobs is None else json.encode(self._logprobs(delta.entries))
        fields = b'"index":%d,"text":%b,"logprobs":%b,"finish_reason":null' % (index, json.encode(delta.text), logprobs)
        ids = _ids(b"prompt_token_ids", delta.prompt_token_ids) + _ids(b"token_ids", delta.token_ids)
        return self._frame.chunk(b"{" + fields + ids + b"}", delta.usage)

    def last(
        self,
        index: int,
        finish_reason: ChatFinish,
        timings: Timings,
        *,
        stop_string: str | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        choice = b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b}' % (index, FINISH_JSON[finish_reason])
        return self._frame.last(choice, timings, usage)

    def usage(self, usage: Usage, timings: Timings) -> bytes:
        return self._frame.usage(usage, timings)

    def end(self, usage: Usage, timings: Timings) -> bytes:
        return DONE

    def error(self, body: bytes) -> bytes:
        return error_event(body)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage, timings: Timings) -> bytes:
        body = Completion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=[self._choice(choice) for choice in choices],
            usage=usage,
            timings=timings,
        )
        return json.encode(body)

    def _choice(self, choice: WholeChoice) -> CompletionChoice:
        return CompletionChoice(
            index=choice.index,
            text=choice.text,
            logprobs=None if self._top_logprobs is None else self._logprobs(choice.entries),
            finish_reason=choice.finish_reason,
            token_ids=_unless_none(choice.token_ids),
            prompt_token_ids=_unless_none(choice.prompt_token_ids),
        )

    def _logprobs(self, entries: Sequence[TokenEntry]) -> CompletionLogprobs:
        text = self._tokenizer.token_text
        return CompletionLogprobs(
            tokens=[text(entry.token) for entry in entries],
            token_logprobs=[finite(entry.logprob.logprob) if entry.logprob else None for entry in entries],
            top_logprobs=[self._top(entry) for entry in entries] if self._top_logprobs else None,
            text_offset=[entry.offset for entry in entries],
        )

    def _top(self, entry: TokenEntry) -> dict[str, float] | None:
        """Return the log probabilities of the most likely tokens and the sampled token, by the tokens' text."""
        if entry.logprob is None:
            return None
        ranked = ((entry.token, entry.logprob.logprob), *entry.logprob.top)
        return {self._tokenizer.token_text(token): finite(logprob) for token, logprob in ranked}


class ChatEncoder:
    """Encodes `chat.completion` objects and their chunks."""

    def __init__(self, head: ResponseHead, tokenizer: Tokenizer, *, with_logprobs: bool) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._frame = ChunkFrame(head, "chat.completion.chunk")

    def delta(self, index: int, delta: ChoiceDelta, *, first: bool) -> bytes:
        parts: list[bytes] = []
        if delta.reasoning:
            parts.append(b'"reasoning_content":' + json.encode(delta.reasoning))
        if delta.text or not (delta.calls or delta.reasoning):
            parts.append(b'"content":' + json.encode(delta.text))
        if delta.calls:
            parts.append(b'"tool_calls":' + json.encode([_call_delta(part) for part in delta.calls]))
        logprobs = json.encode(self._logprobs(delta.entries)) if self._with_logprobs else b"null"
        fields = b'"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":null' % (index, b",".join(parts), logprobs)
        further = _ids(b"prompt_token_ids", delta.prompt_token_ids)
        chunk = self._frame.chunk(b"{" + fields + _ids(b"token_ids", delta.token_ids) + b"}", delta.usage, further)
        return self._frame.chunk(_ROLE % index, delta.usage) + chunk if first else chunk

    def last(
        self,
        index: int,
        finish_reason: ChatFinish,
        timings: Timings,
        *,
        stop_string: str | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        choice = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}' % (index, FINISH_JSON[finish_reason])
        return self._frame.last(choice, timings, usage)

    def usage(self, usage: Usage, timings: Timings) -> bytes:
        return self._frame.usage(usage, timings)

    def end(self, usage: Usage, timings: Timings) -> bytes:
        return DONE

    def error(self, body: bytes) -> bytes:
        return error_event(body)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage, timings: Timings) -> bytes:
        return json.encode(self.completion(choices, usage, timings))

    def completion(self, choices: Sequence[WholeChoice], usage: Usage, timings: Timings) -> ChatCompletion:
        return ChatCompletion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=[self._choice(choice) for choice in choices],
            prompt_token_ids=_unless_none(choices[0].prompt_token_ids),
            usage=usage,
            timings=timings,
        )

    def _choice(self, choice: WholeChoice) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=_message(choice),
            logprobs=self._logprobs(choice.entries) if self._with_logprobs else None,
            finish_reason=choice.chat_finish,
            token_ids=_unless_none(choice.token_ids),
        )

    def _logprobs(self, entries: Sequence[TokenEntry]) -> ChatLogprobs:
        return ChatLogprobs([self._logprob(entry) for entry in entries])

    def _logprob(self, entry: TokenEntry) -> ChatLogprob:
        assert entry.logprob is not None, f"token {entry.token} has no log probability, which the client asked for"
        return ChatLogprob(
            token=self._tokenizer.token_text(entry.token),
            logprob=finite(entry.logprob.logprob),
            bytes=list(self._tokenizer.token_bytes(entry.token)),
            top_logprobs=[self._top(token, logprob) for token, logprob in entry.logprob.top],
        )

    def _top(self, token: int, logprob: float) -> TopLogprob:
        return TopLogprob(self._tokenizer.token_text(token), finite(logprob), list(self._tokenizer.token_bytes(token)))


class StoredChatEncoder(ChatEncoder):
    """Encodes chats as `ChatEncoder` does, and stores them whole, streams as well."""

    def __init__(
        self,
        head: ResponseHead,
        tokenizer: Tokenizer,
        *,
        with_logprobs: bool,
        conversation: Conversation,
        metadata: dict[str, Any],
    ) -> None:
        super().__init__(head, tokenizer, with_logprobs=with_logprobs)
        self._conversation = conversation
        self._metadata = metadata
        self._deltas: dict[int, list[ChoiceDelta]] = {}
        """Parts of the stream, by choice. A choice that goes on after a restart is left out: its first part is lost."""
        self._ended: dict[int, ChatFinish] = {}

    def delta(self, index: int, delta: ChoiceDelta, *, first: bool) -> bytes:
        if first:
            self._deltas[index] = []
        if index in self._deltas:
            self._deltas[index].append(delta)
        return super().delta(index, delta, first=first)

    def last(
        self,
        index: int,
        finish_reason: ChatFinish,
        timings: Timings,
        *,
        stop_string: str | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        self._ended[index] = finish_reason
        return super().last(index, finish_reason, timings, usage=usage)

    def end(self, usage: Usage, timings: Timings) -> bytes:
        if self._deltas.keys() == self._ended.keys():
            ended = sorted(self._ended.items())
            self.whole([whole_choice(index, self._deltas[index], finish) for index, finish in ended], usage, timings)
        return DONE

    def whole(self, choices: Sequence[WholeChoice], usage: Usage, timings: Timings) -> bytes:
        body = json.encode(replace(self.completion(choices, usage, timings), metadata=self._metadata))
        self._conversation.store(self._head.id, body)
        return body


def whole_choice(index: int, deltas: Sequence[ChoiceDelta], finish: ChatFinish) -> WholeChoice:
    """Return the choice of a chat whose parts these are. Ids of tokens are left out."""
    return WholeChoice(
        index,
        "".join([delta.text for delta in deltas]),
        [entry for delta in deltas for entry in delta.entries],
        "stop" if finish == "tool_calls" else finish,
        [part for delta in deltas for part in delta.calls],
        finish,
        reasoning="".join([delta.reasoning for delta in deltas]),
    )


def _ids(name: bytes, tokens: Sequence[int] | None) -> bytes:
    """Return a further field of a JSON object, after a comma. Nothing: there are no tokens to show."""
    return b"" if tokens is None else b',"%b":%b' % (name, json.encode(tokens))


def _unless_none(tokens: Sequence[int] | None) -> Sequence[int] | UnsetType:
    return UNSET if tokens is None else tokens


def _message(choice: WholeChoice) -> AnswerMessage:
    reasoning = choice.reasoning or UNSET
    if not choice.calls:
        return AnswerMessage(content=choice.text, reasoning_content=reasoning)
    calls = tool_calls(choice.calls)
    return AnswerMessage(content=choice.text or None, tool_calls=calls, reasoning_content=reasoning)


def tool_calls(parts: Sequence[CallPart]) -> list[ToolCall]:
    """Return the calls whose parts these are."""
    calls: list[ToolCall] = []
    for _, own_parts in groupby(parts, key=lambda part: part.index):
        first, *rest = own_parts
        assert first.id is not None, f"the first part of call {first.index} has no id"
        assert first.name is not None, f"the first part of call {first.index} has no name"
        arguments = "".join([first.arguments, *(part.arguments for part in rest)])
        calls.append(ToolCall(first.id, FunctionCall(first.name, arguments)))
    return calls


def _call_delta(part: CallPart) -> dict[str, Any]:
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}
