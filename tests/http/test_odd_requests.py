"""Requests that are odd as HTTP: tiny chunks, fields after the body, repeated headers and wrong targets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from baton.core.limits import LimitsConfig
from baton.move.clock import now_s
from baton.serve.http.connections import Connections
from baton.serve.http.protocol import PARTS_MAX, PIECE_BYTES, PIECE_PARTS_MAX, BoundedHttpProtocol
from baton.serve.http.timed_connection import HttpServerConfig
from baton.serve.live.metrics_registry import Metrics
from baton.serve.live.recorder import Recorder
from tests.http.conftest import Server, build_house

HEAD = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b'e\r\n{"prompt":"a"}\r\n0\r\n'
CHUNKS = 40_000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(build_house()) as running:
        yield running


def ask(server: Server, sent: bytes) -> bytes:
    """Send bytes, and return the bytes that the server answers until it closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(65536), b""))


class Sink(asyncio.Transport):
    """A transport that notes whether it is read, and whether it was closed."""

    is_read = True
    is_closed = False

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def is_closing(self) -> bool:
        return self.is_closed

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.is_closed = True


class Reader:
    """An application that reads bodies, and notes their sizes."""

    def __init__(self) -> None:
        self.bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            self.bytes += len(message.get("body", b""))
            if not message.get("more_body", False):
                break
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})


def connect(app: Reader, sink: Sink, connections: Connections | None = None) -> BoundedHttpProtocol:
    """Return the protocol of a new connection."""
    connections = connections or Connections(LimitsConfig(), Recorder(Metrics()))
    config = HttpServerConfig(app, connections, close_s=1.0)
    config.load()
    config.loaded_app = app
    protocol = BoundedHttpProtocol(config, ServerState(), {})
    protocol.connection_made(sink)
    return protocol


def test_connections_with_tiny_chunks_take_turns() -> None:
    """400 connections with 40,000 chunks of a byte each stopped all streams for 8.6 s."""
    reader = Reader()

    async def play() -> None:
        sinks, connections = [Sink(), Sink()], Connections(LimitsConfig(), Recorder(Metrics()))
        for sink in sinks:
            connect(reader, sink, connections).data_received(HEAD + CHUNKED + b"1\r\n \r\n" * CHUNKS)
        most = at_once = 2 * (PARTS_MAX + PIECE_BYTES // 6)  # a piece begins with a head
        while reader.bytes < 2 * CHUNKS:
            before = reader.bytes
            await asyncio.sleep(0)
            at_once = max(at_once, reader.bytes - before)
            assert reader.bytes > most or not any(sink.is_read for sink in sinks)
        assert at_once <= most
        await asyncio.sleep(0)
        assert all(sink.is_read for sink in sinks)

    asyncio.run(play())


def test_the_deadline_of_a_body_holds_while_its_chunks_wait() -> None:
    """It was put off, as that of a body which the server does not read, and 400 connections took 40 s of CPU."""

    async def play() -> None:
        sink = Sink()
        protocol = connect(Reader(), sink)
        protocol.data_received(HEAD + CHUNKED + b"1\r\n \r\n" * CHUNKS)
        await asyncio.sleep(0)
        protocol.end_if_overdue(now_s() + LimitsConfig().body_s / 2)
        assert not sink.is_closed
        protocol.end_if_overdue(now_s() + LimitsConfig().body_s + 1)
        assert sink.is_closed

    asyncio.run(play())


def test_chunks_behind_another_request_are_refused() -> None:
    """The parser takes large pieces of a body with a length, and the chunks of the next request with them."""
    head = HEAD.replace(b"Connection: close\r\n", b"")
    first = head + b"Content-Length: %d\r\n\r\n" % PIECE_BYTES + b" " * PIECE_BYTES

    async def play() -> None:
        sink = Sink()
        protocol = connect(Reader(), sink)
        protocol.data_received(first + head + CHUNKED + b"1\r\n \r\n" * PIECE_PARTS_MAX)
        assert not sink.is_closed
        protocol = connect(Reader(), sink)
        protocol.data_received(first + head + CHUNKED + b"1\r\n \r\n" * 5000)
        assert sink.is_closed

    asyncio.run(play())


def test_a_field_after_the_body_is_no_header(server: Server) -> None:
    """A proxy checks only headers."""
    assert ask(server, HEAD + b"Content-Type: application/json\r\n" + CHUNKED + BODY + b"X: y\r\n\r\n")[9:12] == b"200"
    assert ask(server, HEAD + CHUNKED + BODY + b"Content-Type: application/json\r\n\r\n")[9:12] == b"415"


@pytest.mark.parametrize("name", [b"Host", b"Origin", b"Authorization", b"X-Api-Key", b"Content-Type"])
def test_a_repeated_header_is_refused(server: Server, name: bytes) -> None:
    """A proxy may have checked the other one."""
    sent = b"GET /health HTTP/1.1\r\nConnection: close\r\n" + (name + b": localhost\r\n") * 2 + b"\r\n"
    got = ask(server, sent)
    assert got[9:12] == b"400"
    assert b"2 headers " + name.lower() in got


@pytest.mark.parametrize("line", [b"CONNECT a:1", b"GET http://", b"GET http://a:b/"])
def test_an_invalid_target_is_answered(server: Server, line: bytes) -> None:
    got = ask(server, line + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert got[9:12] == b"400"
    assert b"malformed_request" in got
