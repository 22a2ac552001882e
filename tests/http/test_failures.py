"""Generations that end badly, before and after the first byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from baton.serve.live.live_request import Finish
from tests.http.asgi import Connection, scope, settle

BODY = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
FAILED = Finish(outcome="failed", message="the decode worker died 3 times; send the request again")


def status(client: Connection) -> int:
    return client.sent[0]["status"]


def headers(client: Connection) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in client.sent[0]["headers"]}


def events(client: Connection) -> list[str]:
    return b"".join(message.get("body", b"") for message in client.sent).decode().split("\n\n")


async def end_with(build: Callable, finish: Finish, body: dict[str, object], *, steps: int) -> Connection:
    """Run a request for some steps, then let its last choice end in this way."""
    house = build()
    client = Connection(body)
    answering = asyncio.create_task(house.app(scope(), client.receive, client.send))
    await settle()
    house.gateway.admit()
    for _ in range(steps):
        house.gateway.step()
        await settle()
    house.gateway.running[-1].end(finish)
    await answering
    house.gateway.step()
    assert house.gateway.running == []
    return client


@pytest.mark.parametrize(("stream", "steps"), [(False, 0), (False, 3), (True, 0)])
def test_a_failure_before_the_first_byte_is_a_500(build: Callable, *, stream: bool, steps: int) -> None:
    client = asyncio.run(end_with(build, FAILED, BODY | {"stream": stream}, steps=steps))
    assert status(client) == 500
    error = json.loads(client.sent[1]["body"])["error"]
    assert error["type"] == "server_error"
    assert error["message"] == FAILED.message


@pytest.mark.parametrize("n", [1, 2])
def test_a_failure_in_a_stream_is_its_last_event(build: Callable, n: int) -> None:
    """The error stands in the stream, no [DONE] follows, the connection is closed in good order; no choice goes on."""
    client = asyncio.run(end_with(build, FAILED, BODY | {"stream": True, "n": n}, steps=3))
    assert status(client) == 200
    *_, last, rest = events(client)
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    assert rest == ""
    assert client.sent[-1] == {"type": "http.response.body", "body": b""}


@pytest.mark.parametrize(
    ("finish", "expected", "code", "retry_after"),
    [
        (Finish(outcome="rejected", reject="share", message="m", retry_after_s=2.2), 429, "rate_limit_exceeded", "3"),
        (Finish(outcome="rejected", reject="queue_full", message="m", retry_after_s=0.01), 503, "queue_full", "1"),
        (Finish(outcome="rejected", reject="no_worker", message="m"), 503, "no_worker", "1"),
        (Finish(outcome="rejected", reject="slo", message="m", retry_after_s=7), 503, "slo", "7"),
        (Finish(outcome="rejected", reject="shutdown", message="m"), 503, "shutdown", "1"),
        (Finish(outcome="rejected", reject="too_long", message="m"), 400, "context_length_exceeded", None),
        (Finish(outcome="cancelled"), 503, "cancelled", "1"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_rejection_has_its_status_and_says_when_to_come_again(
    build: Callable, finish: Finish, expected: int, code: str, retry_after: str | None, *, stream: bool
) -> None:
    client = asyncio.run(end_with(build, finish, BODY | {"stream": stream}, steps=0))
    assert status(client) == expected
    assert headers(client).get("retry-after") == retry_after
    assert headers(client)["content-type"] == "application/json"
    error = json.loads(client.sent[1]["body"])["error"]
    assert (error["code"], bool(error["message"])) == (code, True)


def test_a_bug_of_ours_is_a_500_with_a_body_and_the_server_goes_on(build: Callable, serve: Callable) -> None:
    """The traceback goes to the log, not to the client, which is told that the connection ends with the answer."""
    house = build()
    house.gateway.cluster = lambda: 1 // 0
    client = serve(house)
    response = client.get("/cluster", headers={"x-request-id": "find-me"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "ZeroDivision" not in response.text
    assert response.headers["x-request-id"] == "find-me"
    assert response.headers["connection"] == "close"
    assert client.get("/health").status_code == 200
