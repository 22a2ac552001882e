"""Hosts whose KV lies otherwise, in blocks of other sizes or over ranks, hand over to each other."""

from __future__ import annotations

import httpx
import pytest

from tests.hosting import cluster
from tests.serving import RunningServer, nothing_used

PREFILL, DECODE = ("--prefill", "1"), ("--decode", "1")
OTHER_LAYOUTS = {
    "a prefills with two ranks": {"a": (*PREFILL, "--tp", "2"), "b": DECODE},
    "b decodes with four ranks": {"a": PREFILL, "b": (*DECODE, "--tp", "4")},
    "a has larger blocks": {"a": (*PREFILL, "--block-tokens", "64"), "b": DECODE},
    "b has larger blocks, and ranks": {"a": PREFILL, "b": (*DECODE, "--block-tokens", "48", "--tp", "2")},
    "ranks of a share tokens": {"a": PREFILL, "b": (*DECODE, "--block-tokens", "48", "--tp", "1")},
}
SERVER_FLAGS = {"ranks of a share tokens": ("--tp", "4", "--dcp", "2")}


def ask(client: httpx.Client, body: dict) -> dict:
    return client.post("/v1/completions", json=body).raise_for_status().json()


def text_of(answer: dict) -> str:
    return answer["choices"][0]["text"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("a prefills with two ranks", marks=pytest.mark.deep),
        "b has larger blocks, and ranks",
        "ranks of a share tokens",
        pytest.param("b decodes with four ranks", marks=pytest.mark.deep),
        pytest.param("a has larger blocks", marks=pytest.mark.deep),
    ],
)
def test_hosts_whose_kv_lies_otherwise_say_the_same(name: str, hash_server: RunningServer) -> None:
    """The hash engine's next token is a hash of all KV: one byte in a wrong place, and the text is another."""
    prompt = "the same words again and again, " * 20
    bodies = [
        {"prompt": f"{index} {prompt}", "max_tokens": 40, "ignore_eos": True, "temperature": 0} for index in range(4)
    ]
    with hash_server.client() as client:
        expected = [text_of(ask(client, body)) for body in bodies]
    with cluster("hash", OTHER_LAYOUTS[name], *SERVER_FLAGS.get(name, ())) as (server, _), server.client() as client:
        answers = [ask(client, body) for body in bodies]
        assert [text_of(answer) for answer in answers] == expected
        assert {answer["timings"]["decode_worker"] for answer in answers} == {"b.decode-0"}
        assert server.metric("baton_handoff_bytes_total") > 0
        assert "lost" not in server.output()
        server.wait_until(nothing_used, reason="no block is used")


@pytest.mark.parametrize(
    "hosts",
    [
        {"a": (*PREFILL, "--pp", "2"), "b": DECODE},
        pytest.param({"a": PREFILL, "b": (*DECODE, "--tp", "2")}, marks=pytest.mark.deep),
    ],
    ids=["two stages hand over to one rank", "one rank hands over to two"],
)
def test_ranks_and_one_rank_hand_over_to_each_other(
    hosts: dict[str, tuple[str, ...]], tiny_model: str, tiny_server: RunningServer
) -> None:
    """INV-8 with floats: heads and layers of several ranks become the blocks of one, and the reverse."""
    body = {"prompt": "A list of rivers in Europe, and what lies on them: " * 5, "max_tokens": 12, "temperature": 0}
    with tiny_server.client() as client:
        expected = text_of(ask(client, body))
    with cluster(tiny_model, hosts, "--dtype", "float32") as (server, _), server.client() as client:
        answer = ask(client, body)
        assert text_of(answer) == expected
        assert answer["timings"]["decode_worker"] == "b.decode-0"
        assert server.metric("baton_handoff_bytes_total") > 0
