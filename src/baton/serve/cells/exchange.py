"""One request of a client: its attempts at cells, and the response that its client gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import aiohttp
import msgspec
from starlette.types import Scope, Send
from yarl import URL

from baton.core.errors import RequestError
from baton.decide.control.cell_router import FailureCause
from baton.serve.cells.fleet import CellFleet, CellLink
from baton.serve.cells.prefix_key import prefix_key
from baton.serve.http.edge import RequestContext, context_of
from baton.serve.http.resume import HEADER as RESUME_HEADER
from baton.serve.http.resume import SavedStream
from baton.serve.http.stream_marks import ASKING_HEADER, START_HEADER, STREAM_TYPE, MarkedStream, StreamStart
from baton.serve.http.text_response import STREAM_HEADERS
from baton.serve.http.wire.errors import MESSAGES_PATH, RETRY_AFTER_S, ClusterError, ErrorBody, error_body

_OWN_HEADERS = frozenset(
    b"accept-encoding connection content-length content-type cookie forwarded host keep-alive origin te trailer "
    b"transfer-encoding upgrade x-request-id".split()
)
"""Headers of the client's connection, and those that the router sets."""
_OWN_PREFIXES = (b"proxy-", b"x-forwarded-", b"x-baton-")
_RETURNED_HEADERS = ("content-type", "cache-control", "retry-after", "warning", "www-authenticate")
_BROKEN = frozenset({502, 503, 504})
_OVERLOADS = frozenset({"queue_full", "queue_deadline", "slo", "retries", "too_many_connections", "body_memory_full"})
"""Codes of errors with status 503 of a cell that has too much to do. Others: it is loading, or ends."""
_STORED = b'"previous_response_id"'


@dataclass(frozen=True, slots=True)
class _Response:
    """A whole response of a cell."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass(frozen=True, slots=True)
class _Failure:
    """An attempt whose request another cell may serve. `response`: None without a response to pass on."""

    cause: FailureCause
    response: _Response | None = None


@dataclass(slots=True)
class Exchange:
    """The attempts of one request."""

    fleet: CellFleet
    scope: Scope
    body: bytes
    send: Send
    _has_begun: bool = False
    """The head of a stream was sent."""
    _marked: MarkedStream | None = field(init=False, default=None)
    """The stream, if another cell can continue it."""

    async def run(self) -> None:
        """Send the response. Raises ClusterError (503) if no cell serves the request and nothing was sent."""
        headers = self._context.headers
        number, cell = self.fleet.place(prefix_key(headers, self.body))
        try:
            while (failure := await self._attempt(cell)) is not None:
                if self._has_begun and self._marked is None:
                    await self._end_with(_cut("streams of this kind are not continued by another cell"))
                    return
                try:
                    cell = self.fleet.place_again(number, cell, failure.cause)
                except ClusterError as error:
                    await self._give_up(failure, error)
                    return
                self.fleet.resumed += self._has_begun
        finally:
            self.fleet.end(number)

    @property
    def _context(self) -> RequestContext:
        return context_of(self.scope)

    @property
    def _is_continued(self) -> bool:
        """The client has text of the stream. Otherwise another cell computes the request anew."""
        return self._marked is not None and bool(self._marked.tokens)

    async def _give_up(self, failure: _Failure, error: ClusterError) -> None:
        if self._has_begun:
            await self._end_with(_cut(str(error)))
        elif failure.response is not None:
            await self._pass_on(failure.response)
        else:
            raise error

    async def _attempt(self, cell: CellLink) -> _Failure | None:
        """Send the request to a cell, and its response to the client. Return the failure. None: it was answered."""
        if self._marked is not None:
            self._marked.drop_waiting()
        try:
            async with (
                cell.attempts.block(),
                cell.session.request(
                    self.scope["method"],
                    URL(cell.url + self._target(), encoded=True),
                    data=self._sent_body(),
                    headers=list(self._sent_headers()),
                    allow_redirects=False,
                ) as response,
            ):
                taken = await self._take(response)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, msgspec.DecodeError):
            cell.suspected.set()
            return _Failure("broken")
        if isinstance(taken, _Response):
            await self._pass_on(taken)
            return None
        return taken

    def _target(self) -> str:
        query = self.scope["query_string"]
        return self.scope["raw_path"].decode("latin-1") + (f"?{query.decode('latin-1')}" if query else "")

    def _sent_body(self) -> bytes | None:
        if self._marked is None or not self._is_continued:
            return self.body or None
        start = self._marked.start
        stream = SavedStream(
            path=self.scope["path"],
            owner="",
            body=self.body,
            response_id=start.response_id,
            seed=start.seed,
            prompt_hash=start.prompt_hash,
            output=tuple(self._marked.tokens),
            expires_unix_s=0,
        )
        return msgspec.msgpack.encode(stream)

    def _sent_headers(self) -> Iterator[tuple[str, str]]:
        for name, value in self.scope["headers"]:
            if name not in _OWN_HEADERS and not name.startswith(_OWN_PREFIXES):
                yield name.decode("latin-1"), _text(value)
        context, client = self._context, self.scope.get("client")
        if RESUME_HEADER in context.headers and not self._is_continued:
            yield RESUME_HEADER.decode(), context.headers[RESUME_HEADER].decode("latin-1")
        if self.body:
            yield "content-type", STREAM_TYPE if self._is_continued else "application/json"
        yield ASKING_HEADER.decode(), "1"
        yield "accept-encoding", "identity"
        yield "x-request-id", context.request_id
        if client:
            yield "x-forwarded-for", client[0]

    async def _take(self, response: aiohttp.ClientResponse) -> _Failure | _Response | None:
        """Return the failure or the response to pass on. None: the client has got it."""
        if response.status == 200 and response.content_type == "text/event-stream":
            return await self._take_stream(response)
        whole = _Response(response.status, _returned(response), await response.read())
        if response.status in _BROKEN:
            return _Failure("refused" if _code(whole.body) in _OVERLOADS else "broken", whole)
        if self._has_begun:
            await self._end_with(_cut(f"another cell answered {response.status}"))
        elif response.status == 404 and (RESUME_HEADER in self._context.headers or _STORED in self.body):
            return _Failure("unknown", whole)
        else:
            return whole
        return None

    async def _take_stream(self, response: aiohttp.ClientResponse) -> _Failure | None:
        start = response.headers.get(START_HEADER.decode())
        if not self._is_continued:
            self._marked = None if start is None else MarkedStream(msgspec.json.decode(start, type=StreamStart))
        marked = self._marked if start is not None else None
        async for data in response.content.iter_any():
            ready = data if marked is None else marked.feed(data)
            if ready:
                await self._send_events(ready)  # `CellLink.attempts` ends it, unsent, if the client reads slowly
            if marked is not None:
                marked.confirm()
        if marked is not None and marked.is_cut:
            return _Failure("broken")
        await self._send_events(b"" if marked is None else marked.end(), is_last=True)
        return None

    # ---- the client

    async def _pass_on(self, response: _Response) -> None:
        headers = [*response.headers, (b"content-length", b"%d" % len(response.body))]
        await self.send({"type": "http.response.start", "status": response.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": response.body})

    async def _send_events(self, data: bytes, *, is_last: bool = False) -> None:
        if not self._has_begun:
            await self.send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS]})
            self._has_begun = True
        await self.send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _end_with(self, error: RequestError) -> None:
        """End a stream with an error, in the form of its route."""
        path = self.scope["path"]
        name = b"event: error\n" if path.startswith(MESSAGES_PATH) else b""
        await self._send_events(name + b"data: " + error_body(error, path) + b"\n\n", is_last=True)


def _returned(response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    headers = response.headers
    return [(name.encode(), headers[name].encode("latin-1")) for name in _RETURNED_HEADERS if name in headers]


def _text(value: bytes) -> str:
    """Return the value of a header as a text that aiohttp, which sends UTF-8, turns into the same bytes."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _code(body: bytes) -> str:
    """Return the code in an error's body. Empty: it has none."""
    try:
        return msgspec.json.decode(body, type=ErrorBody).error.code or ""
    except msgspec.DecodeError:
        return ""


def _cut(why: str) -> ClusterError:
    message = f"the cell of this stream was lost, and {why}; send the request again"
    return ClusterError(message, status=503, code="cell_lost", retry_after_s=RETRY_AFTER_S)
