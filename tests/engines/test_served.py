"""`baton serve --engine-url` as its users start it: one server process over a fake vLLM in a thread of the test."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.fake_engine import answer_to
from tests.engines.fake_vllm import FakeVllm
from tests.serving import RunningServer, serving

TEXT = "a prompt of the test"
KEY = "k" * 40


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeVllm]:
    started, loops = threading.Event(), list[asyncio.AbstractEventLoop]()
    server = FakeVllm(api_key=KEY)

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await server.start()
        started.set()
        await server.gate.wait()
        await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert started.wait(30)
    yield server
    loops[0].call_soon_threadsafe(server.gate.set)
    thread.join()


@pytest.fixture(scope="module")
def server(fake: FakeVllm) -> Iterator[RunningServer]:
    """The key of the engine comes from the environment."""
    with serving("hash", "--engine-url", f"mixed={fake.url}", environment={"BATON_ENGINE_KEY": KEY}) as running:
        yield running


def test_texts_are_those_of_the_engine(server: RunningServer) -> None:
    with server.client() as client:
        body = {"prompt": TEXT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
        prompt = client.post("/tokenize", json={"prompt": TEXT}).raise_for_status().json()["tokens"]
    text = bytes(token - 3 for token in answer_to(prompt, 20)).decode()  # tokens of the hash model are bytes + 3
    assert answer["choices"][0]["text"] == text
    assert answer["usage"]["completion_tokens"] == 20
    assert answer["timings"]["decode_worker"] == "vllm-0"


def test_the_engine_goes_on_with_the_clients_trace(server: RunningServer, fake: FakeVllm) -> None:
    headers = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    with server.client() as client:
        for sent in (headers, {"traceparent": "00-not-hex-01"}, {}):
            client.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 2}, headers=sent).raise_for_status()
    assert fake.traceparents[-3:] == [headers["traceparent"], "", ""]


def test_the_cluster_shows_the_engine(server: RunningServer, fake: FakeVllm) -> None:
    state = server.cluster()
    assert [(each["id"], each["role"], each["state"]) for each in state["workers"]] == [("vllm-0", "mixed", "ready")]
    assert [(each["address"], each["kv_blocks_total"]) for each in state["hosts"]] == [(fake.url, fake.blocks)]


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/v1/completions", {"prompt": "x", "logprobs": 1}, "logprobs"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a+"}}, "response_format"),
        ("/v1/embeddings", {"input": "x"}, "input"),
        ("/v1/completions", {"prompt": "x", "kv_transfer_params": {"remote_host": "elsewhere"}}, "kv_transfer_params"),
        ("/v1/completions", {"prompt": "x", "bootstrap_room": 7}, "bootstrap_room"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(
    server: RunningServer, fake: FakeVllm, path: str, more: dict, param: str
) -> None:
    """A client's own topology fields would steer the connections of the engines."""
    sent = len(fake.bodies)
    with server.client() as client:
        refused = client.post(path, json=more)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param
    assert len(fake.bodies) == sent


TOPOLOGY = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "elsewhere"},
    "bootstrap_host": "elsewhere",
    "bootstrap_port": 9,
    "bootstrap_room": 7,
    "data_parallel_rank": 3,
}
"""Fields by which routers of vLLM and SGLang steer the connections of engines."""
ROUTES = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 16},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2},
}


@pytest.mark.parametrize("path", ROUTES)
def test_topology_fields_of_clients_reach_no_engine(server: RunningServer, fake: FakeVllm, path: str) -> None:
    """Each route refuses or ignores them, in the body and in what passes on other fields."""
    sent, headers = (
        len(fake.bodies),
        {"x-prefiller-host-port": "elsewhere:1", "x-data-parallel-host-port": "elsewhere:2"},
    )
    with server.client() as client:
        for name, value in TOPOLOGY.items():
            for more in _with_field(name, value):
                answer = client.post(path, json={**ROUTES[path], **more}, headers=headers)
                assert answer.status_code in (200, 400), answer.text
        client.post(path, json=ROUTES[path], headers=headers).raise_for_status()
    _check_no_topology(fake, sent)


def _with_field(name: str, value: Any) -> tuple[dict[str, Any], ...]:
    """Return the field in the body, and in the two fields that pass on others."""
    return {name: value}, {"vllm_xargs": {name: value}}, {"extra_body": {name: value}}


def _check_no_topology(fake: FakeVllm, sent: int) -> None:
    """Check all bodies that the engine got after the first `sent` ones."""
    assert len(fake.bodies) > sent
    for body in fake.bodies[sent:]:
        assert not {name for name, value in body.items() if value is not None} & {*TOPOLOGY}
        assert "elsewhere" not in json.dumps(body)


def test_topology_fields_in_a_batch_reach_no_engine(server: RunningServer, fake: FakeVllm) -> None:
    """Each line of the file is refused or loses the field, as the same request would on its route."""
    sent, route = len(fake.bodies), "/v1/chat/completions"
    bodies = [{**ROUTES[route], **more} for field in TOPOLOGY.items() for more in _with_field(*field)]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": route, "body": body}
        for number, body in enumerate([*bodies, ROUTES[route]])
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    with server.client() as client:
        file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", content)})
        asked = {"input_file_id": file.raise_for_status().json()["id"], "endpoint": route, "completion_window": "24h"}
        batch = client.post("/v1/batches", json=asked).raise_for_status().json()["id"]

        def has_ended(_: dict[str, Any]) -> bool:
            return client.get(f"/v1/batches/{batch}").json()["status"] in ("completed", "failed")

        server.wait_until(has_ended, reason="the batch ended")
        counts = client.get(f"/v1/batches/{batch}").json()["request_counts"]
    assert counts["completed"] >= 1
    assert counts["completed"] + counts["failed"] == len(lines)
    _check_no_topology(fake, sent)


def test_no_host_may_join_such_a_server(server: RunningServer) -> None:
    with server.client() as client:
        refused = client.post("/cluster/hosts", json={})
    assert refused.status_code == 409, refused.text
    assert "servers of another engine" in refused.json()["error"]["message"]
