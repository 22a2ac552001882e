"""The bytes of completions."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import json

from baton.compute.models.tokenizer import Tokenizer
from baton.serve.http.choice import Piece, TokenEntry
from baton.serve.http.wire.dialect import FINISH_JSON, ChunkFrame, Head, Result, finite
from baton.serve.http.wire.responses import ChatFinish, Completion, CompletionChoice, CompletionLogprobs, Usage
from baton.serve.live.port import Timings


class CompletionDialect:
    """Writes `text_completion` objects and their chunks."""

    def __init__(self, head: Head, tokenizer: Tokenizer, *, top_logprobs: int | None) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._top_logprobs = top_logprobs
        self._frame = ChunkFrame(head, "text_completion")

    def delta(self, index: int, piece: Piece, *, first: bool) -> bytes:
        logprobs = b"null" if self._top_logprobs is None else json.encode(self._logprobs(piece.entries))
        return self._frame.chunk(
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}' % (index, json.encode(piece.text), logprobs)
        )

    def last(self, index: int, finish_reason: ChatFinish, timings: Timings) -> bytes:
        reason = FINISH_JSON[finish_reason]
        return self._frame.last(b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b}' % (index, reason), timings)

    def usage(self, usage: Usage, timings: Timings) -> bytes:
        return self._frame.usage(usage, timings)

    def whole(self, results: Sequence[Result], usage: Usage, timings: Timings) -> bytes:
        body = Completion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=[self._choice(result) for result in results],
            usage=usage,
            timings=timings,
        )
        return json.encode(body)

    def _choice(self, result: Result) -> CompletionChoice:
        return CompletionChoice(
            index=result.index,
            text=result.text,
            logprobs=None if self._top_logprobs is None else self._logprobs(result.entries),
            finish_reason=result.finish_reason,
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
        """The likeliest tokens and the drawn one, by their text."""
        if entry.logprob is None:
            return None
        ranked = ((entry.token, entry.logprob.logprob), *entry.logprob.top)
        return {self._tokenizer.token_text(token): finite(logprob) for token, logprob in ranked}
