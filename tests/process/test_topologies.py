"""The real server with real processes: one text from every topology, and a handoff that copies nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.serving import RunningServer, serving

PROMPTS = ["a", "Hello, who is there?", "x" * 100, "The quick brown fox jumps over the lazy dog. " * 20]
TOPOLOGIES = [
    ("--prefill", "2", "--decode", "2"),
    ("--mixed", "1"),
    pytest.param(("--mixed", "2"), marks=pytest.mark.deep),
    ("--prefill", "1", "--mixed", "1"),
]


def _texts(server: RunningServer) -> list[str]:
    with server.client() as client:
        texts = []
        for index, prompt in enumerate(PROMPTS):
            for temperature in (0.0, 1.0):
                body = {"prompt": prompt, "max_tokens": 60, "seed": index, "temperature": temperature}
                answer = client.post("/v1/completions", json=body).raise_for_status().json()
                texts.append(answer["choices"][0]["text"])
    return texts


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=" ".join)
def test_every_topology_gives_the_text_of_one_prefill_and_one_decode_worker(
    topology: tuple[str, ...], hash_server: RunningServer
) -> None:
    """INV-8: the hash engine's next token depends on every byte of KV, so any block that went astray would show."""
    expected = _texts(hash_server)
    with serving("hash", *topology) as server:
        assert _texts(server) == expected


EIGHT_BITS = ("--weights", "stored", "--dtype", "bfloat16", "--kv-dtype", "int8", "--threads", "1")


def _story(server: RunningServer, index: int) -> str:
    prompt = f"Story {index}: there was a fox who lived near the river and " * (1 + 6 * index)
    body = {"prompt": prompt, "max_tokens": 32, "ignore_eos": True, "seed": index, "temperature": 0.7 * (index % 2)}
    with server.client() as client:
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
    return answer["choices"][0]["text"]


def test_8_bits_in_company_and_handed_over_say_what_they_say_alone(tiny_model: str) -> None:
    """INV-8 with weights as a file stores them, sums of bfloat16 and KV of 8 bits: what is rounded is so in one way."""
    with serving(tiny_model, "--mixed", "1", *EIGHT_BITS) as server:
        alone = [_story(server, index) for index in range(4)]
    with (
        serving(tiny_model, "--prefill", "1", "--decode", "1", *EIGHT_BITS) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        assert list(pool.map(partial(_story, server), range(4))) == alone
        assert server.metric("baton_handoff_seconds_count") == 4


def test_the_handoff_copies_no_byte_and_both_workers_take_part(hash_server: RunningServer) -> None:
    with hash_server.client() as client:
        body = {"prompt": "hand this over, please", "max_tokens": 20, "ignore_eos": True}
        timings = client.post("/v1/completions", json=body).raise_for_status().json()["timings"]
    assert timings["prefill_worker"] == "prefill-0"
    assert timings["decode_worker"] == "decode-0"
    assert timings["handoff_s"] > 0
    assert hash_server.metric("baton_handoff_bytes_total") == 0
    assert hash_server.metric("baton_handoff_seconds_count") >= 1


def test_turn_two_reuses_what_decode_produced_in_turn_one(hash_server: RunningServer) -> None:
    """The prefix index is the host's: prefill hits blocks that the decode worker filled."""
    with hash_server.client() as client:
        first_prompt = "the first turn of a conversation" * 2
        body = {"prompt": first_prompt, "max_tokens": 100, "ignore_eos": True, "temperature": 0}
        first = client.post("/v1/completions", json=body).raise_for_status().json()
        second_prompt = first_prompt + first["choices"][0]["text"] + " and now the second turn"
        body = {"prompt": second_prompt, "max_tokens": 10, "temperature": 0}
        second = client.post("/v1/completions", json=body).raise_for_status().json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > first["usage"]["prompt_tokens"]
    assert cached >= first["usage"]["total_tokens"] - 17, "all but the tail block and the token that was never computed"
    assert second["timings"]["cached_tokens"] == cached


def test_a_role_flip_takes_effect_at_once_and_keeps_the_cache(hash_server: RunningServer) -> None:
    with serving("hash", "--prefill", "1", "--decode", "2") as server, server.client() as client:
        prompt = "cached before the flip, and still cached after it"
        client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5}).raise_for_status()
        flipped = client.post("/cluster/workers/decode-1/role", json={"role": "prefill"})
        assert flipped.status_code == 200
        client.post("/cluster/workers/prefill-0/role", json={"role": "decode"}).raise_for_status()
        answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5}).raise_for_status().json()
        assert answer["timings"]["prefill_worker"] == "decode-1"
        assert answer["timings"]["cached_tokens"] > 0
        roles = {worker["id"]: worker["role"] for worker in server.cluster()["workers"]}
        assert roles == {"prefill-0": "decode", "decode-0": "decode", "decode-1": "prefill"}
        assert server.metric("baton_role_flips_total") == 2
