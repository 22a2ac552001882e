"""`baton serve --engine-url` as its users start it: one server process over a fake vLLM in a thread of the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

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


def test_no_host_may_join_such_a_server(server: RunningServer) -> None:
    with server.client() as client:
        refused = client.post("/cluster/hosts", json={})
    assert refused.status_code == 409, refused.text
    assert "servers of another engine" in refused.json()["error"]["message"]
