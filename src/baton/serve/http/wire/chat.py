"""The bytes of chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from msgspec import json

from baton.compute.models.tokenizer import Tokenizer
from baton.serve.http.choice import Piece, TokenEntry
from baton.serve.http.tools.parser import CallPart
from baton.serve.http.wire.dialect import FINISH_JSON, ChunkFrame, Head, Result, finite
from baton.serve.http.wire.responses import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatFinish,
    ChatLogprob,
    ChatLogprobs,
    FunctionCall,
    ToolCall,
    TopLogprob,
    Usage,
)
from baton.serve.live.port import Timings


class ChatDialect:
    """Writes `chat.completion` objects and their chunks."""

    def __init__(self, head: Head, tokenizer: Tokenizer, *, with_logprobs: bool) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._frame = ChunkFrame(head, "chat.completion.chunk")

    def delta(self, index: int, piece: Piece, *, first: bool) -> bytes:
        parts = [b'"role":"assistant"'] if first else []
        if piece.text or not piece.calls:
            parts.append(b'"content":' + json.encode(piece.text))
        if piece.calls:
            parts.append(b'"tool_calls":' + json.encode([_call_delta(part) for part in piece.calls]))
        logprobs = json.encode(self._logprobs(piece.entries)) if self._with_logprobs else b"null"
        return self._frame.chunk(
            b'{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":null}' % (index, b",".join(parts), logprobs)
        )

    def last(self, index: int, finish_reason: ChatFinish, timings: Timings) -> bytes:
        reason = FINISH_JSON[finish_reason]
        return self._frame.last(
            b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}' % (index, reason), timings
        )

    def usage(self, usage: Usage, timings: Timings) -> bytes:
        return self._frame.usage(usage, timings)

    def whole(self, results: Sequence[Result], usage: Usage, timings: Timings) -> bytes:
        body = ChatCompletion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=[self._choice(result) for result in results],
            usage=usage,
            timings=timings,
        )
        return json.encode(body)

    def _choice(self, result: Result) -> ChatChoice:
        return ChatChoice(
            index=result.index,
            message=_message(result),
            logprobs=self._logprobs(result.entries) if self._with_logprobs else None,
            finish_reason=result.ending,
        )

    def _logprobs(self, entries: Sequence[TokenEntry]) -> ChatLogprobs:
        return ChatLogprobs([self._logprob(entry) for entry in entries])

    def _logprob(self, entry: TokenEntry) -> ChatLogprob:
        assert entry.logprob is not None, f"token {entry.token} came without the log probability that was asked for"
        return ChatLogprob(
            token=self._tokenizer.token_text(entry.token),
            logprob=finite(entry.logprob.logprob),
            bytes=list(self._tokenizer.token_bytes(entry.token)),
            top_logprobs=[self._top(token, logprob) for token, logprob in entry.logprob.top],
        )

    def _top(self, token: int, logprob: float) -> TopLogprob:
        return TopLogprob(self._tokenizer.token_text(token), finite(logprob), list(self._tokenizer.token_bytes(token)))


def _message(result: Result) -> AnswerMessage:
    if not result.calls:
        return AnswerMessage(content=result.text)
    calls: list[ToolCall] = []
    for _, parts in groupby(result.calls, key=lambda part: part.index):
        first, *rest = parts
        assert first.id is not None, f"call {first.index} came without its id"
        assert first.name is not None, f"call {first.index} came without its name"
        arguments = "".join([first.arguments, *(part.arguments for part in rest)])
        calls.append(ToolCall(first.id, FunctionCall(first.name, arguments)))
    return AnswerMessage(content=result.text or None, tool_calls=calls)


def _call_delta(part: CallPart) -> dict[str, Any]:
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}
