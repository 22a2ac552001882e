"""Hostile grammars are refused one by one: the server, its workers and another client's stream go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.serving import RunningServer, children, serving
from tests.unit.compute.test_sandbox import HOSTILE, chain


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    config = tmp_path_factory.mktemp("server") / "config.toml"
    config.write_text("[sandbox]\ncpu_s = 0.5\n")
    with serving("hash", "--prefill", "1", "--decode", "1", "--config", str(config)) as running:
        yield running
        assert running.stop() == 0


def _bodies() -> list[dict]:
    """Return one request for each hostile grammar, in the field of its kind."""
    bodies: list[dict] = []
    for grammar, _ in HOSTILE.values():
        if grammar.kind == "json_schema":
            wanted = {"name": "s", "schema": json.loads(grammar.text)} if "$ref" in grammar.text else None
            text = {"response_format": {"type": "json_schema", "json_schema": wanted}}
            bodies.append(text if wanted else {"structured_outputs": {"json": grammar.text}})
        else:
            bodies.append({"structured_outputs": {grammar.kind: grammar.text}})
    tool = {"type": "function", "function": {"name": "f", "parameters": json.loads(chain(1800, "anyOf"))}}
    return [*bodies, {"tools": [tool], "tool_choice": "required"}]


def _ask(client: httpx.Client, **fields: object) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}]
    return client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 20, **fields})


def test_a_sandbox_is_started_before_the_first_grammar(server: RunningServer) -> None:
    """The first grammar would wait for it for about a second."""
    while not children(server.process.pid, "baton.compute.sandbox"):
        assert server.process.poll() is None, server.output()


def test_hostile_grammars_fail_alone(server: RunningServer) -> None:
    pids = server.worker_pids()
    plain = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 400, "ignore_eos": True, "seed": 1}
    with server.client() as client, ThreadPoolExecutor(4) as threads:
        expected = client.post("/v1/chat/completions", json=plain).json()["choices"][0]["message"]["content"]
        stream = threads.submit(client.post, "/v1/chat/completions", json={**plain, "temperature": 1.0})
        for answer in threads.map(lambda body: _ask(client, **body), _bodies() * 3):
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"], answer.text
        again = stream.result().json()["choices"][0]["message"]["content"]
        assert again == expected
        assert _ask(client, guided_regex="[a-f]{4}").json()["choices"][0]["message"]["content"]
    assert server.worker_pids() == pids


def test_a_grammar_with_a_slow_mask_ends_no_worker(server: RunningServer) -> None:
    """Three of them at once ended a worker, and then the server: each failure counted as the worker's."""
    pids = server.worker_pids()
    slow = {"regex": "((a{1000}){1000}){1000}"}
    with server.client() as client, ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda seed: _ask(client, structured_outputs=slow, seed=seed), range(3)))
        for answer in answers:
            assert answer.status_code == 400, answer.text
        assert client.get("/health").status_code == 200
    assert server.worker_pids() == pids
