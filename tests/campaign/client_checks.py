"""Checks of the responses that the HTTP clients of a scenario got."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from baton.core.types import RequestId
from baton.lab.sim.engines import STOP_TOKEN
from baton.lab.sim.journal import Life
from baton.lab.sim.replay_trace import require
from tests.campaign.clients import HttpClient
from tests.campaign.edge import tokenizer

_REFUSALS = {400: "context_length_exceeded", 429: "rate_limit_exceeded"}


def check_client(client: HttpClient, lives: Mapping[RequestId, Life], *, failures_allowed: bool) -> None:
    """INV-1 and INV-8: every client gets one whole response of its own, or its requests end with its connection."""
    task, own = client.serving, [lives[request_id] for request_id in client.requests]
    name = f"the client of {client.requests or client.planned}"
    require(task is not None and task.done(), "INV-1", f"{name} is still being served")
    assert task is not None
    error = task.exception()
    require(error is None, "INV-1", f"serving {name} raised {error!r}")
    if client.died_at_s is not None:
        late = [life.request.id for life in own if life.closes[-1][0] > client.died_at_s]
        require(not late, "INV-2", f"{late} went on after {name} had disconnected")
        return
    require(client.is_complete, "INV-1", f"{name} got no end of its response")
    echoed = client.headers[b"x-request-id"].decode()
    require(echoed == client.planned.request_id, "INV-1", f"{name} got the response of {echoed}")
    if client.status == 200:
        _check_texts(name, client, own, failures_allowed=failures_allowed)
    else:
        _check_refusal(name, client, own, failures_allowed=failures_allowed)


def _check_refusal(name: str, client: HttpClient, own: list[Life], *, failures_allowed: bool) -> None:
    error = json.loads(client.body)["error"]
    assert client.status is not None
    if client.status == 500:
        require(failures_allowed, "INV-1", f"{name} got {error} though no worker died")
        return
    known = client.status == 503 or error["code"] == _REFUSALS.get(client.status)
    require(known and error["message"] != "", "INV-1", f"{name} got {client.status} {error}")
    told = client.status == 400 or float(client.headers[b"retry-after"]) > 0
    require(told, "INV-1", f"{name} was not told when to come again")
    finished = [life.request.id for life in own if life.closes[-1][1].outcome == "finished"]
    require(len(finished) < max(1, len(own)), "INV-1", f"{name} got {client.status}, but {finished} finished")


def _check_texts(name: str, client: HttpClient, own: list[Life], *, failures_allowed: bool) -> None:
    """Compare the text of each choice with the tokens of its request, which `check_text` has compared."""
    texts, failure = _streamed(name, client) if client.planned.stream else _whole(client)
    if failure is not None:
        require(failures_allowed or len(own) > 1, "INV-1", f"{name} got {failure} in its stream though no worker died")
    for index, life in enumerate(own):
        expected = tokenizer().decode([token for token in life.output if token != STOP_TOKEN])
        if client.planned.stop is not None:
            expected = expected.partition(client.planned.stop)[0]
        text = texts.get(index, "")
        if failure is not None:
            expected = expected[: len(text)]
        require(text == expected, "INV-8", f"{life.request.id}: its client got {text!r} instead of {expected!r}")


def _whole(client: HttpClient) -> tuple[dict[int, str], None]:
    return {choice["index"]: choice["text"] for choice in json.loads(client.body)["choices"]}, None


def _streamed(name: str, client: HttpClient) -> tuple[dict[int, str], dict[str, Any] | None]:
    """Return the text of each choice of a stream, and the error that ended it, if any."""
    events = [event.removeprefix("data: ") for event in client.body.decode().split("\n\n")[:-1]]
    texts: dict[int, str] = {}
    ends: list[int] = []
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            require(choice["index"] not in ends, "INV-1", f"{name}: text of choice {choice['index']} after its end")
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            ends += [choice["index"]] if choice["finish_reason"] is not None else []
    if events[-1] != "[DONE]":
        return texts, json.loads(events[-1])["error"]
    require(sorted(ends) == list(range(client.planned.choices)), "INV-1", f"{name}: choices {ends} have ended")
    return texts, None
