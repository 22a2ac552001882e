"""HTTP/1.1 of one connection: bounds on the data of its client, and on the data parsed at once.

Uvicorn does not bound the headers that httptools collects. ADR 19 has the reasons and the alternatives.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httptools
from uvicorn.server import ServerState

from baton.core.errors import RequestError
from baton.move.clock import now_s
from baton.serve.http.timed_connection import LINGER_BYTES_MAX, HttpServerConfig, TimedHttpProtocol

PIPELINED_MAX = 8
"""Maximum unanswered requests of one connection. Common clients send one at a time."""
PIECE_BYTES = 2048
"""Bytes of a head that are parsed at a time."""
CHUNKED_PIECE_BYTES = 512
"""Bytes of a chunked body that are parsed at a time: it may have a part for every 6 bytes."""
PARTS_MAX = 64
"""Parts of a body that a connection may parse at once. For further ones it waits for its turn among connections."""
PIECE_PARTS_MAX = 1024
"""Maximum parts of a body in one piece: more are sent only by a client that hides chunks behind another request."""


class BoundedHttpProtocol(TimedHttpProtocol):
    """One HTTP connection. It answers violations with 431, 408 or 400, without the application, and then closes."""

    def __init__(
        self,
        config: HttpServerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._unused_bytes = 0
        """Bytes that the parser has received since it last returned a head or a part of a body."""
        self._has_returned = False
        self._is_chunked = False
        self._parts = 0
        """Parts of bodies in the data that is being parsed."""
        self._rest = b""
        """Received data that waits for this connection's turn."""

    # ---- the request

    def data_received(self, data: bytes) -> None:
        """Parse received data, or the first part of it if it takes long: one connection per round parses the rest."""
        if self._rest:
            self._rest += data
        else:
            self._parse_data(data)

    def parse_rest(self) -> None:
        """Parse more of the data that waits. Called when it is this connection's turn."""
        rest, self._rest = self._rest, b""
        self._parse_data(rest)
        if not self._rest:
            self._flow.release()

    def _parse_data(self, data: bytes) -> None:
        """Parse the data in pieces, so that unfinished headers and the number of parts are checked between them."""
        rest = data if len(data) <= PIECE_BYTES else memoryview(data)
        self._parts = 0
        while rest and self.parser is not None:
            if self._is_closing:
                self._drop(len(rest))
                return
            if self._parts >= PARTS_MAX:
                self._rest = bytes(rest)
                self._flow.hold()
                self._all.wait_for_turn(self)
                return
            room_bytes = self._limits.header_bytes_max - self._unused_bytes
            if self._phase != "body":
                room_bytes = min(room_bytes, PIECE_BYTES)
            elif self._is_chunked:
                room_bytes = min(room_bytes, CHUNKED_PIECE_BYTES)
            piece = rest[:room_bytes]
            self._has_returned = False
            try:
                rest = rest[self._parse(piece) :]
            except httptools.HttpParserError as error:
                cause = error.__context__
                self._refuse(cause if isinstance(cause, RequestError) else _malformed(error))
                return
            self._unused_bytes = 0 if self._has_returned else self._unused_bytes + len(piece)
            if self._unused_bytes >= self._limits.header_bytes_max:
                self._refuse(_too_large_head("bytes", "header_bytes_max", self._limits.header_bytes_max))

    def _drop(self, count: int) -> None:
        """Drop received bytes, and abort the connection after `LINGER_BYTES_MAX`."""
        self._unused_bytes += count
        if self._unused_bytes > LINGER_BYTES_MAX:
            self.transport.abort()

    def _parse(self, piece: bytes | memoryview) -> int:
        """Parse bytes and return how many were parsed. Raises HttpParserError for a malformed request."""
        try:
            self.parser.feed_data(piece)
            return len(piece)
        except httptools.HttpParserUpgrade as upgrade:
            parsed_bytes = int(upgrade.args[0])
        self._ignore_upgrade()
        return parsed_bytes

    def on_message_begin(self) -> None:
        self._phase, self._deadline_s = "head", now_s() + self._limits.header_s
        self._is_chunked = False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase != "head":
            self._parts += 1
            return  # a field after a chunked body: as a header, it would pass proxies that check only headers
        if len(self.headers) >= self._limits.headers_max:
            raise _too_large_head("headers", "headers_max", self._limits.headers_max)
        name = name.lower()  # what uvicorn does, without a second call for each header
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        elif name == b"transfer-encoding":
            self._is_chunked = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._has_returned = True
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        if len(self._cycles) >= PIPELINED_MAX:
            raise RequestError(f"more than {PIPELINED_MAX} requests wait on one connection; open another one")
        super().on_headers_complete()
        self._phase, self._deadline_s = "body", now_s() + self._limits.body_s
        self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._has_returned = True
        self._parts += 1
        if self._parts > PARTS_MAX + PIECE_PARTS_MAX:
            raise RequestError(f"more than {PIECE_PARTS_MAX} chunks were sent at once; send larger ones")
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the message ends only for this parser: `_ignore_upgrade` reads the body
        self._has_returned = True
        self._phase, self._deadline_s = "response", math.inf
        super().on_message_complete()
        self._await_request()

    def on_response_complete(self) -> None:
        """Do what uvicorn does, except for its timer of idle connections: `end_if_overdue` closes them."""
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
        self._await_request()

    def _await_request(self) -> None:
        """Begin the idle time once every request is received and answered."""
        if self._phase == "response" and self.cycle.response_complete:
            self._phase, self._deadline_s = "idle", now_s() + self._limits.idle_s

    def _ignore_upgrade(self) -> None:
        """Stay with HTTP/1.1 if a request offers another protocol, such as h2c: let a new parser read its body."""
        kept = [header for header in self.headers if header[0] in (b"content-length", b"transfer-encoding")]
        self.parser = httptools.HttpRequestParser(HeadSkipper(self))
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(b"%s: %s\r\n" % header for header in kept) + b"\r\n")


class HeadSkipper:
    """Parser callbacks that skip the first head and pass everything after it to a connection."""

    def __init__(self, connection: BoundedHttpProtocol) -> None:
        self._connection = connection
        self._is_skipping = True

    def on_message_begin(self) -> None:
        if not self._is_skipping:
            self._connection.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_skipping:
            self._connection.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_skipping:
            self._connection.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_skipping:
            self._connection.on_headers_complete()
        self._is_skipping = False

    def on_body(self, body: bytes) -> None:
        self._connection.on_body(body)

    def on_message_complete(self) -> None:
        self._connection.on_message_complete()


def _too_large_head(unit: str, setting: str, most: int) -> RequestError:
    message = (
        f"the request has more than {most} {unit} before its body (limits.{setting}); send fewer or shorter headers"
    )
    return RequestError(message, status=431, code="headers_too_large")


def _malformed(error: httptools.HttpParserError) -> RequestError:
    cause = error.__context__ or error  # such as that of an invalid URL
    return RequestError(f"the request is not valid HTTP/1.1: {cause}", status=400, code="malformed_request")
