"""OpenAI's wire format for a client: request bodies and server-sent events, without sockets."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import Struct

from baton.core.messages import Outcome
from baton.lab.bench.options import Endpoint

LINE_BYTES_MAX = 16 * 1024 * 1024
"""Maximum size of one event of a stream. An answer with a larger event counts as failed."""
_REASON_CHARS_MAX = 200
_WHOLE = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter"})
"""Finish reasons of a complete answer. Others (`abort`, `error`) are failures."""


class Message(Struct):
    """One turn of a chat."""

    role: Literal["user", "assistant"]
    content: str


Prompt = str | list[int] | list[Message]
"""Text, token ids, or (endpoint `chat`) a conversation so far."""


def request_fields(
    *,
    model: str,
    endpoint: Endpoint,
    prompt: Prompt,
    output_tokens: int,
    ignore_eos: bool,
    stream: bool = True,
) -> dict[str, object]:
    """Return the body of a request for greedy decoding of `output_tokens` tokens.

    The answer has exactly that length only if the server supports `ignore_eos`.
    """
    body: dict[str, object] = {"model": model, "max_tokens": output_tokens, "temperature": 0}
    if endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    else:
        body["prompt"] = prompt
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if ignore_eos:
        body["ignore_eos"] = True
    return body


class Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None


class ChunkChoice(Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    @property
    def carries_text(self) -> bool:
        delta = self.delta
        return bool(self.text or self.token_ids or (delta and (delta.content or delta.reasoning_content)))

    @property
    def spoken_text(self) -> str:
        """Return the answer without its reasoning: the text that the next turn repeats."""
        return self.text or (self.delta.content if self.delta is not None else None) or ""


class PromptDetails(Struct):
    cached_tokens: int | None = None


class TokenUsage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class StreamChunk(Struct):
    """The fields of a response, or of one event of a stream, that a measurement needs."""

    choices: list[ChunkChoice] = []
    usage: TokenUsage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


_decoder = msgspec.json.Decoder(StreamChunk)


def read_usage(body: bytes) -> TokenUsage:
    """Return the usage of a response that is not a stream; empty if it has none."""
    try:
        return _decoder.decode(body).usage or TokenUsage()
    except msgspec.DecodeError:
        return TokenUsage()


class _ErrorDetail(Struct):
    message: str


class _ErrorBody(Struct):
    error: _ErrorDetail | str


def error_text(body: bytes) -> str:
    """Return the message of OpenAI's error body, or the start of any other body, in one line."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
        text = error if isinstance(error, str) else error.message
    except msgspec.DecodeError:
        text = body.decode(errors="replace")
    return " ".join(text.split())[:_REASON_CHARS_MAX]


CountedBy = Literal["usage", "chunks"]


@dataclass(slots=True)
class StreamedAnswer:
    """The received part of one stream. Pass the bytes from the socket to `feed`."""

    chunk_times_s: list[float] = field(default_factory=list[float])
    """Arrival time of each chunk with text."""
    chunk_tokens: list[int] = field(default_factory=list[int])
    """Tokens in each of these chunks; 1 if the server does not report them."""
    are_counted: bool = True
    """Every chunk reported its number of tokens."""
    finish_reason: str | None = None
    finished_s: float = 0.0
    done: bool = False
    usage: TokenUsage | None = None
    error: str = ""
    text: list[str] | None = None
    """Pieces of the answer's text. None: do not keep them."""
    _rest: bytes = b""

    def feed(self, data: bytes, now_s: float) -> None:
        """Process bytes that arrived at `now_s`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now_s)
        if len(self._rest) > LINE_BYTES_MAX:
            self.error = f"an event longer than {LINE_BYTES_MAX} bytes"
            self._rest = b""

    def _take(self, payload: bytes, now_s: float) -> None:
        if payload == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _decoder.decode(payload)
        except msgspec.DecodeError as error:
            self.error = self.error or f"an event that cannot be read: {error}"
            return
        if bytes(chunk.error) not in (b"", b"null"):
            self.error = self.error or f"error in the stream: {error_text(payload)}"
        before = (self.usage.completion_tokens or 0) if self.usage else 0
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices[:1]:
            if choice.carries_text:
                self._take_text(choice, chunk.usage, before, now_s)
            if choice.finish_reason is not None:
                self.finish_reason, self.finished_s = choice.finish_reason, now_s

    def _take_text(self, choice: ChunkChoice, usage: TokenUsage | None, before: int, now_s: float) -> None:
        if self.text is not None:
            self.text.append(choice.spoken_text)
        tokens = 0
        if choice.token_ids:
            tokens = len(choice.token_ids)
        elif usage is not None and usage.completion_tokens is not None:
            tokens = usage.completion_tokens - before
        self.are_counted = self.are_counted and tokens > 0
        self.chunk_times_s.append(now_s)
        self.chunk_tokens.append(max(1, tokens))

    @property
    def counted_by(self) -> CountedBy:
        return "usage" if self.usage is not None and self.usage.completion_tokens else "chunks"

    def token_times_s(self) -> array[float]:
        """Return a time for each output token, as `spread_token_times` derives it from the times of the chunks."""
        total = (self.usage.completion_tokens or 0) if self.usage else 0
        times_s, tokens = self.chunk_times_s, self.chunk_tokens
        if not times_s and total and self.finish_reason is not None:
            times_s, tokens = [self.finished_s], [total]  # no text at all, such as a lone end-of-sequence token
        if times_s and total and not (self.are_counted and sum(tokens) == total):
            tokens = split_tokens(total, len(times_s))
        return spread_token_times(times_s, tokens)

    def verdict(self, broken: str) -> tuple[Outcome, str]:
        """Return the outcome, and why it is not `finished`. `broken`: the connection's error, or empty.

        A complete answer has a finish reason, `[DONE]` and at least one token.
        """
        if self.error:
            return "failed", self.error
        if not (self.done and self.finish_reason):
            missing = "[DONE]" if self.finish_reason else "finish_reason"
            return "failed", broken or f"cut off: the stream ended without {missing}"
        if self.finish_reason not in _WHOLE:
            return "failed", f"ended by the server: finish_reason {self.finish_reason}"
        if not self.token_times_s():
            return "failed", "an answer without a token"
        return "finished", ""


def split_tokens(tokens: int, chunks: int) -> list[int]:
    """Divide tokens evenly among chunks. With fewer tokens than chunks, the first and the last chunk get one each."""
    if tokens == 1 or tokens < chunks:
        shares = [0] * chunks
        for index in range(tokens):
            shares[round(index * (chunks - 1) / max(1, tokens - 1))] += 1
        return shares
    return [(index + 1) * tokens // chunks - index * tokens // chunks for index in range(chunks)]


def spread_token_times(chunk_times_s: Sequence[float], chunk_tokens: Sequence[int]) -> array[float]:
    """Return a time for each token: the k tokens of a chunk divide the gap since the previous chunk equally.

    All tokens of the first chunk have its time, because a client cannot read them earlier.
    """
    times_s = array("d")
    previous_s: float | None = None
    for at_s, tokens in zip(chunk_times_s, chunk_tokens, strict=True):
        gap_s = 0.0 if previous_s is None else at_s - previous_s
        times_s.extend(at_s - gap_s * left / tokens for left in range(tokens - 1, -1, -1))
        previous_s = at_s if tokens else previous_s
    return times_s
