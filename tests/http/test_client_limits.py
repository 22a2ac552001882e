"""Limits of one client over HTTP: bodies, requests at once, tokens per minute."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import httpx

from baton.core.config import SandboxConfig
from baton.core.limits import LimitsConfig
from baton.serve.http.services import HttpSettings
from baton.serve.live.metrics_registry import render
from tests.http.conftest import Server, build_house

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "a", "max_tokens": 2}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_unfinished_bodies_beyond_the_memory_of_a_client_are_refused() -> None:
    """Each client may send less than the maximum of one body; together they would hold much."""
    limits = LimitsConfig(client_body_bytes_max=100_000)
    with Server(build_house(settings=HttpSettings(limits=limits))) as server:
        connections = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(4)]
        for connection in connections:
            connection.sendall(HEAD + b"Content-Length: 1000000\r\n\r\n" + b"x" * 40_000)
        refused = b""
        while not refused.endswith(b"}}"):
            refused += connections[-1].recv(65536)
        for connection in connections:
            connection.close()
        assert refused.startswith(b"HTTP/1.1 429 ")
        assert refusals(server, 'reason="rate_limit_exceeded",status="429"') >= 1
        assert b"limits.client_body_bytes_max" in refused
        assert b"\r\nretry-after: 1" in refused
        with httpx.Client(base_url=server.url, timeout=30) as client:
            assert client.post(COMPLETIONS, json=BODY | {"user": "x" * 90_000}).status_code in (200, 400, 429)
            while client.post(COMPLETIONS, json=BODY).status_code == 429:
                pass  # until the server has seen that the others are gone


def test_a_client_with_too_many_requests_waits(build: Callable, serve: Callable) -> None:
    """Routes that take no prompt are not counted. A tokenizer computes, too."""
    limits = LimitsConfig(client_tokens_per_minute=60, client_requests_max=1)
    client = serve(build(settings=HttpSettings(limits=limits)))
    assert client.post(COMPLETIONS, json=BODY | {"prompt": "a" * 100}).status_code == 200
    refused = client.post(COMPLETIONS, json=BODY)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(refused.headers["retry-after"]) > 30
    assert client.get("/v1/models").status_code == 200
    assert client.post("/tokenize", json={"prompt": "a"}).status_code == 429
    assert client.post("/detokenize", json={"tokens": [5]}).status_code == 429


def refusals(server: Server, labels: str) -> float:
    """Return the number of refusals with these labels, in their order. 0: there was none."""
    lines = render(server.house.metrics, {"hash": server.house.metrics}).decode().splitlines()
    found = [line.split()[1] for line in lines if line.startswith(f"baton_http_refusals_total{{{labels}}}")]
    return float(found[0]) if found else 0.0


def test_refusals_of_every_layer_are_counted(server: Server) -> None:
    """Of connections and heads, of bodies, and of requests."""
    large, long = 'reason="body_too_large",status="413"', 'reason="headers_too_large",status="431"'
    before = refusals(server, large), refusals(server, long)
    with httpx.Client(base_url=server.url, timeout=30) as client:
        assert client.post(COMPLETIONS, json={"prompt": "a" * (5 << 20)}).status_code == 413
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"GET /" + b"a" * 40_000)
        assert connection.recv(12) == b"HTTP/1.1 431"
    assert (refusals(server, large), refusals(server, long)) == (before[0] + 1, before[1] + 1)


def test_a_full_queue_is_counted_with_its_reason(build: Callable) -> None:
    with Server(build(waiting_max=0)) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        assert client.post(COMPLETIONS, json=BODY).status_code == 503
        assert refusals(server, 'reason="queue_full",status="503"') == 1


def test_clients_without_a_key_have_shares_of_their_own_in_the_queue_of_grammars(build: Callable) -> None:
    """One address fills its share while no sandbox is free; a grammar of another address still waits for its turn."""
    house = build(sandbox=SandboxConfig(processes=1, waiting_max=4))

    def ask(client: httpx.Client, regex: str) -> httpx.Response:
        return client.post(COMPLETIONS, json=BODY | {"structured_outputs": {"regex": regex}})

    elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
    with (
        Server(house) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
        httpx.Client(base_url=server.url, timeout=30, transport=elsewhere) as other,
        ThreadPoolExecutor(4) as threads,
    ):
        with house.grammars._pool._turns:
            many = [threads.submit(ask, client, regex) for regex in ("[a-b]", "[a-c]", "[a-d]")]
            refused = wait(many, return_when=FIRST_COMPLETED).done.pop().result()
            assert refused.status_code == 429, refused.text
            assert refused.json()["error"]["code"] == "grammar_queue_full"
            single = threads.submit(ask, other, "[a-e]")
            while len(house.grammars._waiting) < 2 and not single.done():
                pass  # until the server has its grammar
        assert single.result().status_code == 200, single.result().text
    house.grammars.close()
