"""Answer one HTTP request: run its choices side by side, streamed or whole, until they end or the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from starlette.types import Receive, Send

from baton.core.errors import RequestError
from baton.serve.http.arrival import send_bytes
from baton.serve.http.choice import Choice, Piece
from baton.serve.http.requests import Done, all_of, hang_up
from baton.serve.http.wire.dialect import DONE, Dialect, Result
from baton.serve.http.wire.errors import error_body
from baton.serve.http.wire.responses import PromptTokensDetails, Usage
from baton.serve.live.port import Timings

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer:
    """The choices of one request on their way to its client."""

    def __init__(self, choices: Sequence[Choice], prompt_tokens: int, dialect: Dialect, *, include_usage: bool) -> None:
        """`prompt_tokens`: of all prompts together, each counted once."""
        self._choices = choices
        self._prompt_tokens = prompt_tokens
        self._dialect = dialect
        self._include_usage = include_usage

    async def run(self, receive: Receive, send: Send, *, stream: bool) -> None:
        """Answer; cancel every generation once the client hangs up. Raises RequestError if nothing was sent yet."""
        client = _Client(receive, self._choices)
        watcher = asyncio.create_task(client.watch())
        try:
            await (_Stream(self, send).run() if stream else self._whole(send))
        except RequestError:
            if not client.gone:
                raise
        finally:
            watcher.cancel()
            for choice in self._choices:
                choice.generation.cancel()  # harmless after the end

    async def _whole(self, send: Send) -> None:
        results = await self.each(self._collect)
        body = self._dialect.whole(results, self.counted(), self.slowest())
        await send_bytes(send, body, status=200, headers={"content-type": "application/json"})

    async def _collect(self, choice: Choice) -> Result:
        pieces: list[Piece] = []
        while choice.finish_reason is None:
            pieces.append(choice.take(await choice.generation.next()))
            choice.mark_sent()
        entries = [entry for piece in pieces for entry in piece.entries]
        calls = [part for piece in pieces for part in piece.calls]
        text = "".join([piece.text for piece in pieces])
        ending = choice.ending or choice.finish_reason
        return Result(choice.index, text, entries, choice.finish_reason, calls, ending)

    async def each(self, work: Callable[[Choice], Awaitable[Done]]) -> list[Done]:
        """Do the same for all choices at once. The first error ends the others, and is raised."""
        return await all_of([work(choice) for choice in self._choices])

    @property
    def choices(self) -> Sequence[Choice]:
        return self._choices

    @property
    def dialect(self) -> Dialect:
        return self._dialect

    @property
    def include_usage(self) -> bool:
        return self._include_usage

    def counted(self) -> Usage:
        """Count the tokens. Cached are those of each prompt's first choice: the others hit what it computed."""
        output_tokens = sum(choice.output_tokens for choice in self._choices)
        firsts = {choice.prompt_index: choice for choice in reversed(self._choices)}
        cached_tokens = sum(choice.generation.timings().cached_tokens for choice in firsts.values())
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=output_tokens,
            total_tokens=self._prompt_tokens + output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens),
        )

    def slowest(self) -> Timings:
        """Get the timings of the choice that took longest: they are the answer's."""
        return max((choice.generation.timings() for choice in self._choices), key=lambda timings: timings.e2e_s or 0.0)


class _Stream:
    """One answer as server-sent events."""

    def __init__(self, answer: Answer, send: Send) -> None:
        self._answer = answer
        self._dialect = answer.dialect
        self._send_message = send
        self._open = False

    async def run(self) -> None:
        """Send every choice as it comes. The status goes out with the first text, so a refusal still has its own."""
        try:
            await self._answer.each(self._run_choice)
        except RequestError as error:
            if not self._open:
                raise
            await self._send(b"data: " + error_body(error) + b"\n\n")
        else:
            if self._answer.include_usage:
                await self._send(self._dialect.usage(self._answer.counted(), self._answer.slowest()))
            await self._send(DONE)
        await self._send_message({"type": "http.response.body", "body": b""})

    async def _run_choice(self, choice: Choice) -> None:
        first = True
        while choice.finish_reason is None:
            piece = choice.take(await choice.generation.next())
            if piece or (first and choice.finish_reason is not None):
                await self._send(self._dialect.delta(choice.index, piece, first=first))
                choice.mark_sent()
                first = False
        choice.mark_sent()
        ending = choice.ending or choice.finish_reason
        await self._send(self._dialect.last(choice.index, ending, choice.generation.timings()))

    async def _send(self, event: bytes) -> None:
        if not self._open:
            self._open = True
            await self._send_message({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS]})
        await self._send_message({"type": "http.response.body", "body": event, "more_body": True})


class _Client:
    """The other end of the connection."""

    def __init__(self, receive: Receive, choices: Sequence[Choice]) -> None:
        self._receive = receive
        self._choices = choices
        self.gone = False

    async def watch(self) -> None:
        """Wait for the client to hang up, then end all of its generations: their last news ends the answer."""
        await hang_up(self._receive)
        self.gone = True
        for choice in self._choices:
            choice.generation.cancel()
