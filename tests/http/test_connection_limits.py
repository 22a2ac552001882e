"""Limits of connections, headers, bodies and readers, over raw sockets. Each attack is a small form of a real one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import logging
import socket
from collections.abc import Iterator, Sequence

import httpx
import pytest
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from baton.core.limits import LimitsConfig
from baton.core.types import Request
from baton.serve.http.connections import LOG_S, REFUSED_MAX, Connections, RefusalLog, client_address
from baton.serve.live.metrics_registry import Metrics
from baton.serve.live.recorder import Recorder
from tests.http.conftest import Server, build_house
from tests.http.inprocess import InProcessGeneration

LIMITS = LimitsConfig(
    header_bytes_max=4096,
    headers_max=20,
    header_s=60.0,
    idle_s=60.0,
    connections_max=24,
    address_connections_max=12,
)
"""Deadlines that no test reaches, not even on a busy machine."""
SHORT_DEADLINES = replace(LIMITS, header_s=0.4, body_s=1.0, idle_s=0.8)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(build_house(limits=LIMITS)) as running:
        yield running


@pytest.fixture(scope="module")
def hasty_server() -> Iterator[Server]:
    with Server(build_house(limits=SHORT_DEADLINES)) as running:
        yield running


@pytest.fixture
def connection(server: Server) -> Iterator[socket.socket]:
    with connect(server) as connection:
        yield connection


@pytest.fixture
def hasty_connection(hasty_server: Server) -> Iterator[socket.socket]:
    with connect(hasty_server) as connection:
        yield connection


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def check_refused(connection: socket.socket, status: int, code: str, *words: str) -> str:
    """Read a response to its end. It has the status, OpenAI's body with the code, and the words in its message."""
    head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), head
    assert b"\r\nconnection: close" in head
    error = json.loads(body)["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["code"] == code
    assert all(word in error["message"] for word in words), error["message"]
    return head.decode()


def send_until_closed(connection: socket.socket, piece: bytes, *, bytes_max: int) -> int:
    """Send the piece again and again. Return the number of bytes that the server took before it closed."""
    sent = 0
    try:
        while sent < bytes_max:
            sent += connection.send(piece)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return sent


# ---- headers


def test_one_header_without_end_is_a_431(connection: socket.socket) -> None:
    """The parser would collect it for ever, and copy it with every piece."""
    connection.sendall(HEAD + b"x: " + b"a" * 8192)
    check_refused(connection, 431, "headers_too_large", "4096 bytes", "limits.header_bytes_max")


def test_an_endless_header_is_cut_off(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"x: ")
    assert send_until_closed(connection, b"a" * 65536, bytes_max=2**30) < 2**30


def test_a_request_line_without_end_is_a_431(connection: socket.socket) -> None:
    connection.sendall(b"GET /" + b"a" * 5000)
    check_refused(connection, 431, "headers_too_large", "limits.header_bytes_max")


def test_many_headers_are_a_431(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"".join(b"a%d: b\r\n" % number for number in range(30)) + b"\r\n")
    check_refused(connection, 431, "headers_too_large", "20 headers", "limits.headers_max")


def test_headers_of_exactly_the_maximum_are_read(connection: socket.socket) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: "
    connection.sendall(head + b"a" * (4096 - len(head) - 4) + b"\r\n\r\n")
    assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_trailers_without_end_are_a_431(connection: socket.socket) -> None:
    """Headers after a chunked body are collected as those before it are."""
    connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx: " + b"a" * 9000)
    check_refused(connection, 431, "headers_too_large")


def test_many_chunks_of_one_byte_are_a_body_like_any_other(connection: socket.socket) -> None:
    body = b'{"max_tokens": 1, "prompt": "' + b"x" * 3000 + b'"}'
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    connection.sendall(HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
    assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_requests_on_one_connection_are_counted_apart(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for _ in range(5):
            assert client.get("/health", headers={"x": "a" * 3000}).status_code == 200


def test_no_http_at_all_is_a_400(connection: socket.socket) -> None:
    connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    check_refused(connection, 400, "malformed_request")


class LateEnd:
    """An application that ends a response long after its last byte, as one that closes a file."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        if scope["method"] == "GET":
            await send({"type": "http.response.body", "body": b"ok", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.mark.parametrize(("method", "end"), [("GET", b"\r\n\r\nok"), ("HEAD", b"\r\n\r\n")])
def test_a_request_after_a_whole_response_is_refused_with_an_answer(method: str, end: bytes) -> None:
    """It was closed without one while the application had not ended the response."""
    house = dataclasses.replace(build_house(limits=LIMITS), app=LateEnd())
    with Server(house) as server, connect(server) as connection:
        connection.sendall(f"{method} / HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        got = b""
        while not got.endswith(end):
            got += connection.recv(65536)
        connection.sendall(b"no HTTP\r\n\r\n")
        check_refused(connection, 400, "malformed_request")


def test_line_ends_without_end_are_cut_off(connection: socket.socket) -> None:
    assert send_until_closed(connection, b"\r\n" * 32768, bytes_max=2**30) < 2**30


def test_pipelined_requests_are_answered_in_order_up_to_a_maximum(server: Server, connection: socket.socket) -> None:
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    connection.sendall(get * 3 + last)
    assert read_all(connection).count(b"HTTP/1.1 200 ") == 4
    with connect(server) as greedy:
        greedy.sendall(get * 100)
        assert read_all(greedy).count(b"HTTP/1.1 200 ") < 100


# ---- times


def test_headers_that_come_too_slowly_are_a_408(hasty_connection: socket.socket) -> None:
    hasty_connection.sendall(HEAD)
    check_refused(hasty_connection, 408, "request_timeout", "headers", "0.4 s", "limits.header_s")


def test_a_body_that_comes_too_slowly_is_a_408(hasty_connection: socket.socket) -> None:
    hasty_connection.sendall(HEAD + b'Content-Length: 100\r\n\r\n{"prompt":')
    check_refused(hasty_connection, 408, "request_timeout", "body", "1 s", "limits.body_s")


def test_a_body_that_was_refused_and_stops_is_not_awaited(hasty_connection: socket.socket) -> None:
    hasty_connection.sendall(HEAD + b"Content-Length: 99999999\r\n\r\nxx")
    answer = read_all(hasty_connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_connection_without_a_request_is_closed_without_an_answer(hasty_connection: socket.socket) -> None:
    assert read_all(hasty_connection) == b""


def test_a_stream_outlives_the_time_of_headers_bodies_and_idle_connections(hasty_server: Server) -> None:
    """The client reads slowly, so the stream takes longer than every other deadline."""
    body = json.dumps({"prompt": "a", "max_tokens": 40, "ignore_eos": True, "stream": True}).encode()
    gateway = hasty_server.house.gateway
    gateway.pace_s = 0.04
    try:
        with connect(hasty_server) as connection:
            connection.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert b"data: [DONE]" in read_all(connection)
    finally:
        gateway.pace_s = 0.0


def test_a_reader_that_stops_is_disconnected_and_its_request_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text with log probabilities overflows the buffers of the sockets half-way."""
    house, generations = build_house(limits=replace(LIMITS, send_s=0.4)), list[InProcessGeneration]()
    gateway, submit = house.gateway, house.gateway.submit
    gateway.pace_s = 0.01  # the steps after the deadline of the reader do not reach the end of the text

    def submit_and_note(request: Request, prompt: Sequence[int]) -> InProcessGeneration:
        generations.append(submit(request, prompt))
        return generations[-1]

    monkeypatch.setattr(gateway, "submit", submit_and_note)
    choices = {"n": 16, "max_tokens": 400, "logprobs": 20, "ignore_eos": True, "stream": True}
    body = json.dumps({"prompt": "a", **choices}).encode()
    with (
        Server(house) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
        socket.socket() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert connection.recv(12) == b"HTTP/1.1 200"
        while len(generations) < 16 or gateway.running:
            client.get("/health")  # other clients are answered while this one still has not read
        assert {generation.finish and generation.finish.outcome for generation in generations} == {"cancelled"}
        with contextlib.suppress(ConnectionResetError):
            assert b"[DONE]" not in read_all(connection)


# ---- numbers


def test_connections_beyond_the_maximum_of_an_address_are_a_429(server: Server) -> None:
    """The others go on: they were there first."""
    first = [connect(server) for _ in range(12)]
    try:
        with connect(server) as late:
            head = check_refused(late, 429, "too_many_connections", "at most 12", "limits.address_connections_max")
            assert "\r\nretry-after: 1" in head
        first[0].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert read_all(first[0]).startswith(b"HTTP/1.1 200 ")
    finally:
        for connection in first:
            connection.close()


# ---- units


class Peer:
    """A connection of an address."""

    def __init__(self, address: str) -> None:
        self.address = address

    def end_if_overdue(self, now_s: float) -> None:
        pass


def test_connections_are_counted_by_address_and_in_all_and_a_proxy_only_in_all() -> None:
    async def story() -> None:
        limits = LimitsConfig(address_connections_max=1, connections_max=4)
        connections = Connections(limits, Recorder(Metrics()), proxies=["10.0.0.9"])
        first = Peer("10.0.0.1")
        assert connections.add(first) is None
        second = Peer("10.0.0.1")
        refused = connections.add(second)
        assert refused is not None
        assert refused.status == 429
        connections.remove(second)
        assert [connections.add(Peer("10.0.0.9")) for _ in range(3)] == [None] * 3
        full = connections.add(Peer("10.0.0.2"))
        assert full is not None
        assert full.status == 503
        assert "limits.connections_max" in str(full)
        connections.remove(first)
        assert len(connections) == 4

    asyncio.run(story())


def test_a_proxy_may_have_an_address_of_ipv6() -> None:
    """Connections are counted by its network."""

    async def story() -> None:
        limits = LimitsConfig(address_connections_max=1)
        connections = Connections(limits, Recorder(Metrics()), proxies=["2001:db8::9"])
        peers = [Peer(client_address(address)) for address in ("2001:db8::9", "2001:db8::9", "2001:db8:1::9")]
        assert [connections.add(peer) for peer in peers] == [None] * 3

    asyncio.run(story())


def test_refused_connections_of_one_address_do_not_fill_the_server() -> None:
    """They stay open while they wait for their error response."""

    async def story() -> None:
        connections = Connections(LimitsConfig(address_connections_max=1, connections_max=4), Recorder(Metrics()))
        flood = [Peer("10.0.0.1") for _ in range(1 + REFUSED_MAX + 1)]
        errors = [connections.add(peer) for peer in flood]
        assert errors[0] is None
        assert all(error is not None and error.status == 429 for error in errors[1:])
        assert connections.may_answer(flood[0])
        assert not connections.may_answer(flood[-1])
        assert connections.add(Peer("10.0.0.2")) is None

    asyncio.run(story())


def test_an_ipv6_client_counts_by_its_network() -> None:
    assert client_address("2001:db8:1:2:aaaa::1") == client_address("2001:db8:1:2:bbbb::2")
    assert client_address("2001:db8:1:2::1") != client_address("2001:db8:1:3::1")
    assert client_address("::ffff:10.0.0.1") == "10.0.0.1" == client_address("10.0.0.1")
    assert client_address("") == ""


def test_refusals_of_one_kind_make_one_line_per_interval() -> None:
    log = RefusalLog()
    assert log.line("400", "10.0.0.1: not HTTP", 0.0) == "refused 10.0.0.1: not HTTP"
    assert [log.line("400", "10.0.0.2: not HTTP", 1.0) for _ in range(1000)] == [""] * 1000
    assert log.line("431", "10.0.0.1: headers", 1.0) != ""
    assert log.line("400", "10.0.0.3: not HTTP", LOG_S) == (
        "refused 10.0.0.3: not HTTP (1000 more like it since the last line)"
    )


def test_malformed_requests_fill_no_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            with connect(server) as connection:
                connection.sendall(b"no http\r\n\r\n")
                read_all(connection)
    assert len(caplog.records) <= 1


def test_without_a_descriptor_connections_wait_until_there_is_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The listener of uvloop would close them, or try again without a pause."""
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")] * 3

    def accept_later(listening: socket.socket) -> object:
        if failures:
            raise failures.pop()
        return accept(listening)

    monkeypatch.setattr("baton.move.ipc.acceptor.ACCEPT_RETRY_S", 0.01)
    monkeypatch.setattr(socket.socket, "accept", accept_later)
    with caplog.at_level(logging.WARNING, logger="baton.server"), Server(build_house()) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
    assert not failures
    assert [record.getMessage() for record in caplog.records] == [
        "refused new connections for now: [Errno 24] Too many open files; raise the limit of this process: ulimit -Hn"
    ]
