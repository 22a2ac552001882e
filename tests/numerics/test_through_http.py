"""The embedded model through HTTP with separate prefill and decode gives the tokens of transformers in float32."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
import transformers

from tests.numerics.prompts import PROMPTS, Prompt
from tests.numerics.smollm2_reference import OUTPUT_TOKENS, Texts, compute_texts, read_texts
from tests.seeds import Seeds
from tests.serving import NO_TLS, RunningServer, serving

CONCURRENCY = 6

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def expected() -> Texts:
    return read_texts()


@pytest.mark.deep
def test_the_stored_texts_are_those_of_transformers(reference: transformers.PreTrainedModel, expected: Texts) -> None:
    assert compute_texts(reference) == expected


def _answers(server: RunningServer, prompts: tuple[Prompt, ...] = PROMPTS) -> Texts:
    async def ask(client: httpx.AsyncClient, gate: asyncio.Semaphore, prompt: Prompt) -> tuple[str, int]:
        common = {"max_tokens": OUTPUT_TOKENS, "temperature": 0}
        async with gate:
            if prompt.messages:
                body = {"messages": list(prompt.messages), **common}
                answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
                text = answer["choices"][0]["message"]["content"]
            else:
                body = {"prompt": prompt.text, **common}
                answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
                text = answer["choices"][0]["text"]
        return text, answer["usage"]["completion_tokens"]

    async def ask_all() -> Texts:
        gate = asyncio.Semaphore(CONCURRENCY)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, verify=NO_TLS) as client:
            answers = await asyncio.gather(*(ask(client, gate, prompt) for prompt in prompts))
        return {prompt.name: answer for prompt, answer in zip(prompts, answers, strict=True)}

    return asyncio.run(ask_all())


def test_one_prefill_and_one_decode_worker_give_the_text_of_transformers(
    smollm_server: RunningServer, expected: Texts, seeds: Seeds
) -> None:
    """Twice: the second time most prompts hit the prefix cache, and the text is the same.

    Every other prompt, and the rest on the next day, but not the longest one, whose 4,000 tokens take as long as the
    others together; a deep run has all of them.
    """
    prompts = PROMPTS if seeds.deep else PROMPTS[seeds.day % 2 : -1 : 2]
    texts = {prompt.name: expected[prompt.name] for prompt in prompts}
    assert _answers(smollm_server, prompts) == texts
    hits_before = smollm_server.metric("baton_prefix_hit_tokens_total")
    again = prompts if seeds.deep else sorted(prompts, key=lambda prompt: len(prompt.text))[-6:]
    assert _answers(smollm_server, again) == {prompt.name: expected[prompt.name] for prompt in again}
    assert smollm_server.metric("baton_prefix_hit_tokens_total") > hits_before + (4000 if seeds.deep else 200)
    assert smollm_server.metric("baton_handoff_bytes_total") == 0


@pytest.mark.deep
@pytest.mark.parametrize("topology", [("--prefill", "2", "--decode", "2"), ("--mixed", "1")], ids=" ".join)
def test_other_topologies_give_the_same_text(topology: tuple[str, ...], expected: Texts) -> None:
    with serving("--dtype", "float32", *topology) as server:
        assert _answers(server) == expected


def test_a_handoff_takes_less_than_a_decode_step(smollm_server: RunningServer) -> None:
    """Between two idle processes. Medians of one run."""
    with smollm_server.client() as client:
        timings = [
            client.post("/v1/completions", json={"prompt": f"Number {index} is", "max_tokens": 4}).json()["timings"]
            for index in range(9)
        ]
    handoffs = sorted(timing["handoff_s"] for timing in timings if timing["handoff_s"] is not None)
    steps = sorted(timing["tpot_s"] for timing in timings if timing["tpot_s"] is not None)
    assert handoffs[len(handoffs) // 2] < steps[len(steps) // 2]


def test_turn_two_of_a_chat_reuses_the_answer_of_turn_one(smollm_server: RunningServer) -> None:
    """Another process decoded the answer than the one that finds it in the cache."""
    messages = [{"role": "user", "content": "Name five animals that live in the sea, with a word about each."}]
    with smollm_server.client() as client:
        body = {"messages": messages, "max_tokens": 80, "temperature": 0}
        first = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        reply = first["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And three on land?"}]
        body = {"messages": messages, "max_tokens": 8, "temperature": 0}
        second = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"] + 16


def test_the_workers_of_a_host_map_one_copy_of_the_weights(smollm_server: RunningServer) -> None:
    """As a sealed file, whose pages they share; the weights take 520 MiB."""
    for pid in smollm_server.worker_pids():
        maps = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        assert [words[1] for words in maps if "baton-weights" in words[-2]] == ["r--s"]
        status = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        assert int(status["RssAnon"].split()[0]) < 300 * 1024
