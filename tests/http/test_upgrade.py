"""A request that offers another protocol is served over HTTP/1.1, with its body: clients such as Java's offer h2c."""

from __future__ import annotations

import json
import socket

import pytest

from tests.http.conftest import Server

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LAST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
BODY = json.dumps({"prompt": "a" * 50, "max_tokens": 1}).encode()


def ask(server: Server, *pieces: bytes) -> bytes:
    """Send each piece once the server has taken the one before it. Return all that comes back."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        for piece in pieces:
            connection.sendall(piece)
            if b"Expect: " in piece:
                assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        return b"".join(iter(lambda: connection.recv(65536), b""))


def check(answers: bytes) -> None:
    """The first response is of the whole body, the second one of the request after it."""
    assert answers.count(b"HTTP/1.1 200 ") == 2, answers
    assert b'"prompt_tokens":50' in answers
    assert answers.endswith(b'{"status":"ready"}')


def test_a_body_behind_its_head(server: Server) -> None:
    check(ask(server, HEAD + OFFER + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY + LAST))


def test_a_body_that_is_sent_later(server: Server) -> None:
    head = HEAD + OFFER + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    check(ask(server, head, BODY[:20], BODY[20:] + LAST))


def test_a_body_in_chunks(server: Server) -> None:
    chunks = b"%x\r\n" % 20 + BODY[:20] + b"\r\n%x\r\n" % (len(BODY) - 20) + BODY[20:] + b"\r\n0\r\n\r\n"
    check(ask(server, HEAD + OFFER + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + LAST))


def test_a_body_in_an_unknown_encoding_is_refused(server: Server) -> None:
    """The first parser stops at the offer, so only the second one reads the encoding."""
    answers = ask(server, HEAD + OFFER + b"Transfer-Encoding: gzip\r\n\r\n")
    assert answers.startswith(b"HTTP/1.1 400 "), answers


def test_a_body_is_never_read_as_the_next_request(server: Server) -> None:
    """Behind a proxy, a client could otherwise write a request in another client's name."""
    inner = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answers = ask(server, HEAD + OFFER + b"Content-Length: %d\r\n\r\n" % len(inner) + inner + LAST)
    assert answers.count(b"HTTP/1.1 400 ") == 1, answers
    assert answers.count(b"HTTP/1.1 200 ") == 1
    assert b"max_model_len" not in answers


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
def test_a_request_without_a_body(server: Server, protocol: bytes) -> None:
    offer = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n" % protocol
    assert ask(server, offer + LAST).count(b"HTTP/1.1 200 ") == 2
