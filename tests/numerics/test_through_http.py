"""The embedded model through HTTP with separate prefill and decode: the tokens of transformers, JSON and tool calls.

Its server takes 9 s of CPU to start, so all tests that need it stand here. Its vocabulary comes from a GGUF file.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import transformers

from tests.numerics.prompts import PROMPTS, Prompt
from tests.numerics.smollm2_reference import OUTPUT_TOKENS, Texts, compute_texts, read_texts
from tests.seeds import Seeds
from tests.serving import NO_TLS, RunningServer, serving

CONCURRENCY = 6

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "languages": {"type": "array", "items": {"enum": ["Python", "C++", "Rust"]}, "minItems": 1, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "languages", "home"],
    "additionalProperties": False,
}

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
    """Between two idle processes. The shortest of each: on a busy machine both may take longer than they need."""
    with smollm_server.client() as client:
        timings = [
            client.post("/v1/completions", json={"prompt": f"Number {index} is", "max_tokens": 4}).json()["timings"]
            for index in range(9)
        ]
    handoffs = [timing["handoff_s"] for timing in timings if timing["handoff_s"] is not None]
    steps = [timing["tpot_s"] for timing in timings if timing["tpot_s"] is not None]
    assert min(handoffs) < min(steps)


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


def test_the_cluster_page_names_the_attention_backend(smollm_server: RunningServer) -> None:
    with smollm_server.client() as client:
        workers = client.get("/cluster").json()["workers"]
    assert {worker["attention_backend"] for worker in workers} <= {"native", "sdpa"}


def test_the_workers_of_a_host_map_one_copy_of_the_weights(smollm_server: RunningServer) -> None:
    """As a sealed file, whose pages they share; the weights take 520 MiB."""
    for pid in smollm_server.worker_pids():
        maps = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        assert [words[1] for words in maps if "baton-weights" in words[-2]] == ["r--s"]
        status = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        assert int(status["RssAnon"].split()[0]) < 300 * 1024


def _ask(server: RunningServer, fields: dict[str, Any]) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": "Describe a programmer as JSON: name, age, languages, home (city, zip)."}]
    with server.client(timeout_s=120) as client:
        answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 150, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


@pytest.mark.parametrize("drawn", [{"temperature": 0}, {"seed": 5, "top_p": 0.9, "frequency_penalty": 0.5, "n": 2}])
def test_generated_json_validates(smollm_server: RunningServer, drawn: dict[str, Any]) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    for choice in _ask(smollm_server, {"response_format": named, **drawn}):
        assert choice["finish_reason"] == "stop"
        jsonschema_rs.validate(PERSON, json.loads(choice["message"]["content"]))


def test_a_choice_is_made_token_by_token(smollm_server: RunningServer) -> None:
    (choice,) = _ask(smollm_server, {"structured_outputs": {"choice": ["Café Zürich", "naïve 😀", "no"]}, "seed": 2})
    assert choice["message"]["content"] in ("Café Zürich", "naïve 😀", "no")


def test_a_model_whose_template_has_no_tools_calls_one(smollm_server: RunningServer) -> None:
    """The prompt describes the tools, the call follows their schema, and its result is sent back."""
    place = {"type": "string", "maxLength": 20}
    schema = {"type": "object", "properties": {"city": place}, "required": ["city"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "weather", "description": "Weather now", "parameters": schema}}
    required = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    (choice,) = _ask(smollm_server, required)
    assert choice["finish_reason"] == "tool_calls"
    (call, *_) = choice["message"]["tool_calls"]
    jsonschema_rs.validate(schema, json.loads(call["function"]["arguments"]))
    question = {"role": "user", "content": "Weather in Rome?"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny, 21 degrees"}
    talk = [question, choice["message"], result]
    (after,) = _ask(smollm_server, {"messages": talk, "tools": [tool], "temperature": 0, "max_tokens": 20})
    assert after["message"]["content"]
