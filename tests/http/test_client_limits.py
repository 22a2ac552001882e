"""Limits of one client over HTTP: bodies, requests at once, tokens per minute."""

from __future__ import annotations

import socket
from collections.abc import Callable

import httpx

from baton.core.limits import LimitsConfig
from baton.serve.http.services import HttpSettings
from tests.http.conftest import Server, build_house

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "a", "max_tokens": 2}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_unfinished_bodies_beyond_the_memory_of_a_client_are_refused() -> None:
    """Each client may send less than the maximum of one body; together they would hold much."""
    limits = LimitsConfig(client_body_bytes_max=100_000)
    with Server(build_house(settings=HttpSettings(block_tokens=16, limits=limits))) as server:
        connections = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(4)]
        for connection in connections:
            connection.sendall(HEAD + b"Content-Length: 1000000\r\n\r\n" + b"x" * 40_000)
        refused = b""
        while not refused.endswith(b"}}"):
            refused += connections[-1].recv(65536)
        for connection in connections:
            connection.close()
        assert refused.startswith(b"HTTP/1.1 429 ")
        assert b"limits.client_body_bytes_max" in refused
        assert b"\r\nretry-after: 1" in refused
        with httpx.Client(base_url=server.url, timeout=30) as client:
            assert client.post(COMPLETIONS, json=BODY | {"user": "x" * 90_000}).status_code in (200, 400, 429)
            while client.post(COMPLETIONS, json=BODY).status_code == 429:
                pass  # until the server has seen that the others are gone


def test_a_client_with_too_many_requests_waits(build: Callable, serve: Callable) -> None:
    """Routes that compute nothing are not counted."""
    limits = LimitsConfig(client_tokens_per_minute=60, client_requests_max=1)
    client = serve(build(settings=HttpSettings(block_tokens=16, limits=limits)))
    assert client.post(COMPLETIONS, json=BODY | {"prompt": "a" * 100}).status_code == 200
    refused = client.post(COMPLETIONS, json=BODY)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(refused.headers["retry-after"]) > 30
    assert client.get("/v1/models").status_code == 200
    assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200
