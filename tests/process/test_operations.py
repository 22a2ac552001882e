"""Routes of an operator: the requests that run, and the end of one of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serving import POLL_S, POLLS_MAX, RunningServer

LONG = {"prompt": "a long answer", "max_tokens": 2000, "ignore_eos": True, "seed": 0}
"""With this seed the first token has text, so that a stream begins before the decode worker goes on."""


@contextlib.contextmanager
def halted_decode(server: RunningServer) -> Iterator[None]:
    """Stop the decode worker, so that no request can finish meanwhile."""
    pid = next(worker["pid"] for worker in server.cluster()["workers"] if worker["role"] == "decode")
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def running(client: httpx.Client) -> dict[str, Any]:
    """Return the running requests by the id that their client gave."""
    found = client.get("/cluster/requests").raise_for_status().json()
    assert found["total"] >= len(found["requests"])
    return {request["id"].rsplit("-", 2)[0]: request for request in found["requests"]}


def wait_for(client: httpx.Client, name: str) -> dict[str, Any]:
    """Return a running request once its first token has been computed."""
    pause = threading.Event()
    for _ in range(POLLS_MAX):
        found = running(client).get(name)
        if found is not None and found["phase"] == "decode":
            return found
        pause.wait(POLL_S)
    raise AssertionError(f"{name} never runs")


def test_an_operator_cancels_a_stream(hash_server: RunningServer) -> None:
    """Its client gets an error that SDKs do not retry, as the last event."""
    with hash_server.client() as client, hash_server.client() as operator, halted_decode(hash_server):
        with client.stream(
            "POST", "/v1/completions", json={**LONG, "stream": True}, headers={"x-request-id": "endless"}
        ) as response:
            lines = (line[6:] for line in response.iter_lines() if line.startswith("data: "))
            assert "choices" in json.loads(next(lines))
            found = wait_for(operator, "endless")
            assert (found["output_tokens"], found["output_tokens_max"]) == (1, 2000)
            assert found["age_s"] > 0
            done = operator.post("/cluster/cancel", json={"id": "endless"})
            assert done.json() == {"cancelled": [found["id"]]}
            *_, last = lines
        assert json.loads(last)["error"]["code"] == "cancelled_by_operator"
        assert "endless" not in running(operator)
        again = operator.post("/cluster/cancel", json={"id": "endless"})
        assert (again.status_code, "GET /cluster/requests" in again.text) == (404, True)


def test_every_choice_of_a_cancelled_request_ends_with_410(hash_server: RunningServer) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        with hash_server.client() as client:
            answers.append(client.post("/v1/completions", json={**LONG, "n": 2}, headers={"x-request-id": "pair"}))

    with hash_server.client() as operator, halted_decode(hash_server):
        asking = threading.Thread(target=ask)
        asking.start()
        wait_for(operator, "pair")
        assert len(operator.post("/cluster/cancel", json={"id": "pair"}).json()["cancelled"]) == 2
        asking.join()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (410, "cancelled_by_operator")
    assert "retry-after" not in answers[0].headers


@pytest.mark.parametrize(("host", "status", "words"), [("host-0", 409, "own host"), ("nowhere", 404, "joined: none")])
def test_only_joined_hosts_are_drained(hash_server: RunningServer, host: str, status: int, words: str) -> None:
    with hash_server.client() as client:
        refused = client.post(f"/cluster/hosts/{host}/drain", json={})
    assert (refused.status_code, words in refused.json()["error"]["message"]) == (status, True)
