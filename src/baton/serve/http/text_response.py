"""The response to one request for text: whole, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from starlette.types import Receive, Send

from baton.core.errors import RequestError
from baton.serve.http.choice import ChoiceDelta, ChoiceText
from baton.serve.http.edge import run_all, send_bytes, wait_for_disconnect
from baton.serve.http.resume import StreamSaver
from baton.serve.http.stream_marks import StreamMarks
from baton.serve.http.wire.encoders import ResponseEncoder, WholeChoice, whole_choice
from baton.serve.http.wire.errors import error_body
from baton.serve.http.wire.responses import PromptTokensDetails, Usage
from baton.serve.live.gateway import SERVING_STATES, LiveGateway
from baton.serve.live.live_request import Timings

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
INLINE_ENTRIES_MAX = 256
"""Maximum log probabilities that are encoded in the event loop: 20 ms if each has 20 alternatives."""
UsageChunks = Literal["none", "last", "all"]
"""Chunks of a stream that have the usage: none, a last one, or every chunk (the usage so far)."""


class TextResponse:
    """The response to one HTTP request: sends the choices, and cancels them once the client disconnects."""

    def __init__(
        self,
        gateway: LiveGateway,
        choices: Sequence[ChoiceText],
        *,
        encoder: ResponseEncoder,
        usage_chunks: UsageChunks,
        saver: StreamSaver | None,
        marks: StreamMarks | None = None,
    ) -> None:
        """`saver`: saves the stream if the server ends before it does. None: the stream cannot be resumed.

        `marks`: adds to the stream the marks with which a router continues it. None: the client asks for none.
        """
        self._gateway = gateway
        self._choices = choices
        self._encoder = encoder
        self._usage_chunks = usage_chunks
        self._saver = saver
        self._marks = marks
        self._disconnected = False

    async def run(self, receive: Receive, send: Send, *, stream: bool) -> None:
        """Send the response. Raises RequestError if it fails before a byte of the response was sent."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await (self._stream(_EventStream(send, self._stream_headers())) if stream else self._send_whole(send))
        except RequestError:
            if not self._disconnected:
                raise
        finally:
            watcher.cancel()
            self._cancel_all()

    async def _watch(self, receive: Receive) -> None:
        """Cancel all choices once the client disconnects. Their results then end the response."""
        await wait_for_disconnect(receive)
        self._disconnected = True
        self._cancel_all()

    def _cancel_all(self) -> None:
        for choice in self._choices:
            self._gateway.cancel(choice.live)  # no effect on a choice that has ended

    async def _next(self, choice: ChoiceText) -> ChoiceDelta:
        """Wait for new tokens of a choice, and return the parts that can be sent to the client now."""
        delta = choice.apply(await choice.live.next())
        if choice.is_cut_short:  # ended by its text (stop string, last call): stop the worker
            self._gateway.finish(choice.live)
        return delta

    def _mark_sent(self, choice: ChoiceText) -> None:
        tokens = choice.take_unsent_tokens()
        if tokens:
            self._gateway.mark_sent(choice.live, tokens)

    async def _send_whole(self, send: Send) -> None:
        whole = await run_all([self._collect(choice) for choice in self._choices])
        usage, timings = self.usage(), self._timings()
        entries = sum(len(choice.entries) for choice in whole)
        body = await _encode(lambda: self._encoder.whole(whole, usage, timings), entries)
        await send_bytes(send, body, status=200, headers={"content-type": "application/json"})

    async def _collect(self, choice: ChoiceText) -> WholeChoice:
        deltas: list[ChoiceDelta] = []
        while choice.finish_reason is None:
            deltas.append(await self._next(choice))
            self._mark_sent(choice)
        wants_ids = choice.rules.with_token_ids
        return replace(
            whole_choice(choice.index, deltas, choice.chat_finish or choice.finish_reason),
            finish_reason=choice.finish_reason,
            stop_string=choice.stop_string,
            token_ids=[token for delta in deltas for token in delta.token_ids or ()] if wants_ids else None,
            prompt_token_ids=choice.prompt.tokens if wants_ids else None,
        )

    async def _stream(self, events: _EventStream) -> None:
        """Stream all choices. The status is sent with the first text, so an earlier error can set another status."""
        try:
            await run_all([self._stream_choice(choice, events) for choice in self._choices])
        except RequestError as error:
            if not events.is_open:
                raise
            await events.send(self._encoder.error(error_body(await self._resumable(error))))
        else:
            if self._disconnected:
                return
            usage, timings = self.usage(), self._timings()
            if self._usage_chunks != "none":
                await events.send(self._encoder.usage(usage, timings))
            end = await _encode(lambda: self._encoder.end(usage, timings), self._entries())
            if end:
                await events.send(end)
        await events.close()

    async def _resumable(self, error: RequestError) -> RequestError:
        """Return the error for the client. If the server's end caused it, save the stream, so it can be resumed."""
        if self._saver is None or self._disconnected or self._gateway.state in SERVING_STATES:
            return error
        return await self._saver.save(self._choices[0]) or error

    async def _stream_choice(self, choice: ChoiceText, events: _EventStream) -> None:
        first = not choice.live.request.resumed_tokens
        while choice.finish_reason is None:
            delta = await self._next(choice)
            if self._disconnected:
                return  # encoding the many unread tokens of a client that is gone would delay other streams
            if delta or (first and choice.finish_reason is not None):
                event = await self._delta(choice, delta, first=first)
                if self._marks is not None and choice.finish_reason is None:
                    event += self._marks.mark(choice)
                await events.send(event)
                self._mark_sent(choice)
                first = False
        self._mark_sent(choice)
        chat_finish = choice.chat_finish or choice.finish_reason
        timings = choice.live.timings()
        usage = self.usage() if self._usage_chunks == "all" else None
        last = self._encoder.last(choice.index, chat_finish, timings, stop_string=choice.stop_string, usage=usage)
        await events.send(last)

    def _stream_headers(self) -> list[tuple[bytes, bytes]]:
        return STREAM_HEADERS if self._marks is None else [*STREAM_HEADERS, self._marks.header(self._choices[0])]

    async def _delta(self, choice: ChoiceText, delta: ChoiceDelta, *, first: bool) -> bytes:
        if self._usage_chunks == "all":
            delta = replace(delta, usage=self.usage())
        return await _encode(lambda: self._encoder.delta(choice.index, delta, first=first), len(delta.entries))

    def usage(self) -> Usage:
        """Count the tokens. `cached_tokens` counts the first choice of each prompt: the others reuse its blocks."""
        output_tokens = sum(choice.output_tokens for choice in self._choices)
        firsts = {choice.prompt_index: choice for choice in reversed(self._choices)}
        prompt_tokens = sum(len(choice.prompt.tokens) for choice in firsts.values())
        cached_tokens = sum(choice.live.timings().cached_tokens for choice in firsts.values())
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=output_tokens,
            total_tokens=prompt_tokens + output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens),
        )

    def _entries(self) -> int:
        """Return the number of log probabilities of the whole output, for a stream that is stored."""
        return sum(choice.output_tokens for choice in self._choices if choice.rules.with_logprobs)

    def _timings(self) -> Timings:
        """Return the timings of the slowest choice."""
        return max((choice.live.timings() for choice in self._choices), key=lambda timings: timings.e2e_s or 0.0)


async def _encode(encode: Callable[[], bytes], entries: int) -> bytes:
    """Run `encode` on `entries` log probabilities: in a thread if they are many, to not delay other streams."""
    return await asyncio.to_thread(encode) if entries > INLINE_ENTRIES_MAX else encode()


class _EventStream:
    """A response of server-sent events. The first event sends the status and the headers."""

    def __init__(self, send: Send, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self.is_open = False

    async def send(self, event: bytes) -> None:
        if not self.is_open:
            self.is_open = True
            await self._send({"type": "http.response.start", "status": 200, "headers": [*self._headers]})
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def close(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})
