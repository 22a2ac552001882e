"""Clients that hang up or stop reading. Driven at the ASGI level, so that every order of events is certain."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.types import Message

from baton.serve.http.wire.encoders import CompletionEncoder
from baton.serve.live.live_request import UPDATE_TOKENS_MAX
from tests.http.asgi import Connection, scope, settle
from tests.serving import NO_TLS

BODY = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


async def undisturbed(house: Any) -> str:
    """The text of the same request for a client that reads all the time."""
    client = Connection(BODY | {"stream": True})
    answering = asyncio.create_task(house.app(scope(), client.receive, client.send))
    running = asyncio.create_task(house.gateway.run())
    await answering
    running.cancel()
    return client.text()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_client_that_hangs_up_cancels_all_its_generations(
    build: Callable, *, stream: bool, n: int, steps: int
) -> None:
    """While queued (0 steps) as well as while running, streamed or not: every block is free at once."""

    async def story() -> None:
        house = build()
        client = Connection(BODY | {"stream": stream, "n": n})
        answering = asyncio.create_task(house.app(scope(), client.receive, client.send))
        await settle()
        for _ in range(steps):
            house.gateway.admit()
            house.gateway.step()
            await settle()
        assert not answering.done()
        client.hang_up()
        await answering
        house.gateway.admit()
        house.gateway.step()
        [worker] = house.gateway.cluster().workers
        assert (worker.running, worker.waiting, worker.kv_blocks_used) == (0, 0, 0)
        assert [m for m in client.sent if m["type"] == "http.response.start"] == client.sent[:1]

    asyncio.run(story())


def test_a_client_that_hangs_up_while_sending_its_body_is_let_go(build: Callable) -> None:
    async def story() -> None:
        house = build()
        sent: list[Message] = []
        incoming = [{"type": "http.disconnect"}, {"type": "http.request", "body": b'{"pro', "more_body": True}]

        async def receive() -> Message:
            return incoming.pop()

        async def send(message: Message) -> None:
            sent.append(message)

        await house.app(scope(), receive, send)
        assert sent == []

    asyncio.run(story())


def test_a_client_that_stops_reading_gets_the_rest_in_few_pieces(build: Callable) -> None:
    """While it does not read, tokens pile up as tokens, not as chunks; when it reads again nothing is lost."""

    async def story() -> None:
        house = build()
        client = Connection(BODY | {"stream": True})
        answering = asyncio.create_task(house.app(scope(), client.receive, client.send))
        await settle()
        house.gateway.admit()
        for _ in range(10):
            house.gateway.step()
            await settle()
        before = len(client.sent)
        client.reading.clear()
        for _ in range(190):
            house.gateway.step()
            await settle()
        assert len(client.sent) == before
        assert not answering.done()
        client.reading.set()
        await answering
        assert client.text() == await undisturbed(house)
        pieces = -(-190 // UPDATE_TOKENS_MAX)
        assert len(client.sent) <= before + pieces + 4  # one that hung in the socket, the rest, end, [DONE], close

    asyncio.run(story())


def test_tokens_that_a_cut_client_has_not_read_are_not_encoded(build: Callable) -> None:
    """8 such clients with log probabilities kept the event loop busy for 5 s."""

    async def story() -> None:
        house = build()
        client = Connection(BODY | {"stream": True})
        answering = asyncio.create_task(house.app(scope(), client.receive, client.send))
        await settle()
        house.gateway.admit()
        client.reading.clear()
        for _ in range(200):
            house.gateway.step()
            await settle()
        client.hang_up()
        await settle()
        client.reading.set()
        await answering
        assert len(client.text()) < UPDATE_TOKENS_MAX

    asyncio.run(story())


def test_many_log_probabilities_are_encoded_in_a_thread(build: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 32 choices would delay the streams of other clients for seconds."""
    threads: list[str] = []
    whole = CompletionEncoder.whole

    def note_thread(*arguments: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return whole(*arguments)

    monkeypatch.setattr(CompletionEncoder, "whole", note_thread)

    async def story(output_tokens: int) -> None:
        house = build()
        client = Connection(BODY | {"max_tokens": output_tokens, "n": 3, "logprobs": 5})
        answering = asyncio.create_task(house.app(scope(), client.receive, client.send))
        running = asyncio.create_task(house.gateway.run())
        await answering
        running.cancel()
        body = json.loads(client.sent[1]["body"])
        assert [len(choice["logprobs"]["tokens"]) for choice in body["choices"]] == [output_tokens] * 3

    asyncio.run(story(10))
    asyncio.run(story(100))
    assert threads[0] == "MainThread"
    assert threads[1] != "MainThread"


def test_tokens_count_as_sent_once_their_chunk_is(build: Callable) -> None:
    """TTFT is what the client sees: a chunk that hangs in the socket has not been sent."""

    async def story() -> None:
        house = build()
        client = Connection(BODY | {"stream": True})
        client.reading.clear()
        answering = asyncio.create_task(house.app(scope(), client.receive, client.send))
        await settle()
        house.gateway.admit()
        [generation] = house.gateway.running
        house.gateway.step()
        await settle()
        assert generation.sent_tokens == 0
        client.reading.set()
        await settle()
        assert generation.sent_tokens == 1
        client.hang_up()
        await answering

    asyncio.run(story())


@pytest.mark.parametrize("house", ["server", "hash_server"])
def test_a_closed_socket_frees_its_blocks_and_the_server_goes_on(house: str, request: pytest.FixtureRequest) -> None:
    """The same over a real connection, cut in the middle of a stream; over one engine, and over two workers."""
    url = httpx.URL(request.getfixturevalue(house).url)
    body = json.dumps(BODY | {"max_tokens": 4000, "stream": True})
    with socket.create_connection((url.host, url.port), timeout=60) as connection:
        head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        connection.sendall("\r\n".join([*head, f"Content-Length: {len(body)}", "", body]).encode())
        assert connection.recv(16).startswith(b"HTTP/1.1 200")
    with httpx.Client(base_url=url, timeout=30, verify=NO_TLS) as client:
        while client.get("/cluster").json()["hosts"][0]["kv_blocks_used"]:
            pass  # each round is one request served; the test's timeout bounds it
        assert client.post("/v1/completions", json=BODY).status_code == 200
