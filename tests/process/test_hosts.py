"""Several hosts behind one server: the same text, whatever moves between them and whoever dies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.hosting import cluster
from tests.serving import RunningServer

PREFILL, DECODE = ("--prefill", "1"), ("--decode", "1")
LONG = {"prompt": "a request that runs for a while", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}
PROMPT = {"prompt": "the same words again and again, " * 20, "max_tokens": 40, "ignore_eos": True, "temperature": 0}


def ask(client: httpx.Client, body: dict) -> dict:
    return client.post("/v1/completions", json=body).raise_for_status().json()


def text_of(answer: dict) -> str:
    return answer["choices"][0]["text"]


def stream(client: httpx.Client, body: dict) -> Iterator[dict]:
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])


def wait_until(server: RunningServer, condition: Callable[[dict], bool], *, what: str) -> dict:
    """Ask /cluster until the condition holds. Bounded by the number of asks, each of which waits for the server."""
    for _ in range(20_000):
        state = server.cluster()
        if condition(state):
            return state
    raise AssertionError(f"never happened: {what}; last seen {state}\n{server.output()}")


def nothing_used(state: dict) -> bool:
    """INV-2 and INV-4, on every host."""
    return all(
        host["kv_blocks_used"] == 0 and host["kv_blocks_free"] + host["kv_blocks_cached"] == host["kv_blocks_total"]
        for host in state["hosts"]
    )


@pytest.fixture(scope="module")
def mixed_text(hash_server: RunningServer) -> Callable[[dict], str]:
    """What a single worker says."""

    def say(body: dict) -> str:
        with hash_server.client() as client:
            return text_of(ask(client, body))

    return say


def test_prefill_on_one_host_and_decode_on_another_say_what_one_worker_says(mixed_text) -> None:
    """INV-8. The KV comes over the wire: as many bytes as the prompt's blocks have, and the metric says so."""
    with cluster("hash", {"a": PREFILL, "b": DECODE}) as (server, _), server.client() as client:
        answer = ask(client, PROMPT)
        assert text_of(answer) == mixed_text(PROMPT)
        timings = answer["timings"]
        assert (timings["prefill_worker"], timings["decode_worker"]) == ("a.prefill-0", "b.decode-0")
        assert timings["handoff_s"] > 0
        blocks = -(-answer["usage"]["prompt_tokens"] // 16)
        state = wait_until(server, nothing_used, what="no block is used")
        assert [host["state"] for host in state["hosts"]] == ["ready", "ready"]
        assert server.metric("baton_handoff_bytes_total") == blocks * state["hosts"][0]["kv_block_bytes"]
        assert 'host="b"' in client.get("/metrics").text
