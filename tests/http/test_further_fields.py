"""Fields of other servers' APIs: ignored where they are unknown, and what the known ones do."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from baton.compute.sandbox.template import SandboxedTemplate
from baton.core.config import SandboxConfig
from baton.serve.http.services import HttpSettings
from tests.http.test_completions import CHAT, COMPLETIONS, GREEDY, chat, complete, events

USER = [{"role": "user", "content": "hi"}]
UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "a", "max_token": 5}, "max_token"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
    (CHAT, {"messages": USER, "prompt": "a", "echo": True}, "prompt, echo"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0].weight"),
    ("/v1/responses", {"input": [{"role": "user", "content": "x", "phase": 1}]}, "input[0].phase"),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}], "max_tokens": 1},
        "messages[0].content[0].y",
    ),
    ("/v1/messages/count_tokens", {"messages": USER, "odd": 1}, "odd"),
    ("/v1/embeddings", {"input": "a", "truncate": True}, "truncate"),
    ("/tokenize", {"content": "a", "with_pieces": False}, "with_pieces"),
    ("/detokenize", {"tokens": [5], "odd": 1}, "odd"),
    (COMPLETIONS, {"prompt": "a", 'ev"il\r\nx: 1\\é': 1}, "ev?il??x: 1??"),
]


@pytest.mark.parametrize(("path", "body", "named"), UNKNOWN)
def test_unknown_fields_are_ignored_and_named_in_a_header(
    client: httpx.Client, path: str, body: dict[str, Any], named: str
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["warning"] == f'299 - "unknown fields were ignored: {named}"'
    if path in (COMPLETIONS, CHAT, "/v1/messages", "/v1/responses"):
        streamed = client.post(path, json=body | {"stream": True, "max_tokens": 1} if path != "/v1/responses" else body)
        assert named in streamed.headers["warning"]


def test_many_unknown_fields_make_a_short_header(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, json={"prompt": "a", **{f"field{index}" + "x" * 100: 1 for index in range(50)}})
    assert response.headers["warning"].endswith('and 42 more"')
    assert len(response.headers["warning"]) < 700


def test_a_known_request_has_no_warning(client: httpx.Client) -> None:
    assert "warning" not in client.post(COMPLETIONS, json=GREEDY).headers


def test_the_log_names_an_unknown_field_once(build, serve, caplog: pytest.LogCaptureFixture) -> None:
    client = serve(build())
    with caplog.at_level(logging.WARNING, "baton.server"):
        for _ in range(3):
            client.post(CHAT, json={"messages": [{"role": "user", "content": "x", "temprature": 1}] * 2})
            client.post(CHAT, json={"messages": USER, "temprature": 1})
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "requests have the unknown field messages.temprature: it is ignored; --strict-api rejects it",
        "requests have the unknown field temprature (did you mean 'temperature'?): it is ignored; "
        "--strict-api rejects it",
    ]


@pytest.mark.parametrize(("path", "body", "named"), UNKNOWN[:-1])
def test_a_strict_api_rejects_them(build, serve, path: str, body: dict[str, Any], named: str) -> None:
    client = serve(build(settings=HttpSettings(strict_api=True)))
    response = client.post(path, json=body)
    assert response.status_code == 400
    assert "unknown field" in response.json()["error"]["message"]


def test_a_field_that_would_change_the_answer_is_rejected_beside_an_unknown_one(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, json={"prompt": "a", "use_beam_search": True, "frobnicate": 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "use_beam_search"


def test_no_tokens_only_fill_the_cache(client: httpx.Client) -> None:
    for made in (complete(client, prompt="a", max_tokens=0), chat(client, max_tokens=0)):
        assert made["choices"][0]["finish_reason"] == "length"
        assert made["usage"]["completion_tokens"] == 0
    assert complete(client, prompt="a", max_tokens=0)["choices"][0]["text"] == ""


def test_token_ids_are_returned_whole_and_streamed(client: httpx.Client) -> None:
    prompt = client.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]
    [whole] = complete(client, **GREEDY, return_token_ids=True)["choices"]
    assert whole["prompt_token_ids"] == prompt
    assert len(whole["token_ids"]) == 12
    chunks = [chunk["choices"][0] for chunk in events(client, COMPLETIONS, GREEDY | {"return_token_ids": True})]
    assert [token for chunk in chunks for token in chunk.get("token_ids", ())] == whole["token_ids"]
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [prompt]
    body = {"messages": USER, "temperature": 0, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
    said = chat(client, **body)
    chunks = events(client, CHAT, body)
    tokens = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]
    assert tokens == said["choices"][0]["token_ids"]
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [said["prompt_token_ids"]]
    assert "token_ids" not in complete(client, **GREEDY)["choices"][0]


def test_bad_words_of_one_and_of_more_tokens_do_not_occur(client: httpx.Client) -> None:
    body = GREEDY | {"max_tokens": 60, "return_token_ids": True}
    free = complete(client, **body)["choices"][0]["token_ids"]
    # The hash model's tokens are bytes: 3 + byte.
    at = next(i for i in range(len(free) - 1) if all(3 + 33 <= token < 3 + 127 for token in free[i : i + 2]))
    pair = free[at : at + 2]
    word = bytes(token - 3 for token in pair).decode()
    bound = complete(client, **body, bad_words=[word])["choices"][0]["token_ids"]
    assert bound[: at + 1] == free[: at + 1]
    assert pair not in [bound[i : i + 2] for i in range(len(bound))]
    bound = complete(client, **body, bad_words=[word[0]])["choices"][0]["token_ids"]
    assert pair[0] not in bound


def test_the_stop_string_may_stay(client: httpx.Client) -> None:
    text = complete(client, **GREEDY)["choices"][0]["text"]
    stop = text[4:6]
    for stream in (False, True):
        body = GREEDY | {"stop": stop, "include_stop_str_in_output": True}
        if stream:
            said = "".join(chunk["choices"][0]["text"] for chunk in events(client, COMPLETIONS, body))
        else:
            said = complete(client, **body)["choices"][0]["text"]
        assert said == text[: text.index(stop) + len(stop)]


STREAMS_MAX = 50
"""Streams of one request until one has more than two chunks."""


def test_every_chunk_may_have_the_usage_so_far(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, body in ((COMPLETIONS, GREEDY), (CHAT, {"messages": USER, "max_tokens": 12, "ignore_eos": True})):
        asked = body | {"stream_options": options}
        for _ in range(STREAMS_MAX):
            counts = [chunk["usage"]["completion_tokens"] for chunk in events(client, path, asked)]
            assert counts == sorted(counts)
            assert counts[-1] == 12
            if len(counts) > 2:
                break  # a busy server sends several tokens in one chunk
        assert len(counts) > 2


def test_a_chat_stream_begins_with_the_role_alone(client: httpx.Client) -> None:
    first, second, *_ = events(client, CHAT, {"messages": USER, "max_tokens": 3, "ignore_eos": True})
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "role" not in second["choices"][0]["delta"]
    assert first["system_fingerprint"].startswith("baton-")


THINKING = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{{ reasoning_effort }}assistant: "
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def test_reasoning_is_a_field_of_its_own(build, serve) -> None:
    template = SandboxedTemplate(THINKING, {}, SandboxConfig())
    client = serve(build(template=template))
    try:
        text = "<think>\nI wonder.\n</think>\n\nYes."
        body = {"messages": USER, "max_tokens": 100, "structured_outputs": {"choice": [text]}}
        [said] = chat(client, **body)["choices"]
        assert (said["message"]["reasoning_content"], said["message"]["content"]) == ("I wonder.", "Yes.")
        deltas = [chunk["choices"][0]["delta"] for chunk in events(client, CHAT, body)]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I wonder."
        assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
        [said] = chat(client, **body, include_reasoning=False)["choices"]
        assert "reasoning_content" not in said["message"]
        [said] = chat(client, **body, reasoning_effort="none")["choices"]
        assert said["message"]["content"] == text, "the prompt has closed the reasoning already"
        low, none = (chat(client, messages=USER, max_tokens=1, reasoning_effort=effort) for effort in ("low", "none"))
        assert low["usage"]["prompt_tokens"] == len("user: hi\nlowassistant: ")
        assert none["usage"]["prompt_tokens"] == len("user: hi\nnoneassistant: <think>\n\n</think>\n\n")
        asked = {"input": "hi", "reasoning": {"effort": "none", "summary": "auto"}}
        counted = client.post("/v1/responses/input_tokens", json=asked).raise_for_status().json()
        assert counted["input_tokens"] == none["usage"]["prompt_tokens"]
    finally:
        template.close()


def test_reasoning_is_an_item_of_a_response(build, serve) -> None:
    """The prompt opens the reasoning, and no text of the hash model closes it."""
    source = "{{ messages[0].content }}{% if false %}</think>{% endif %}<think>"
    template = SandboxedTemplate(source, {}, SandboxConfig())
    client = serve(build(template=template))
    try:
        asked = {"input": "hi", "max_output_tokens": 8, "temperature": 0}
        [item] = client.post("/v1/responses", json=asked).raise_for_status().json()["output"]
        [said] = chat(client, messages=USER, max_tokens=8, temperature=0)["choices"]
        assert (item["type"], item["content"][0]["text"]) == ("reasoning", said["message"]["reasoning_content"])
    finally:
        template.close()


def test_probes_and_pages_of_other_servers_are_there(client: httpx.Client) -> None:
    assert client.get("/ping").json() == client.post("/ping").json() == {"status": "ready"}
    assert client.get("/docs").headers["content-type"].startswith("text/html")


def test_the_tokenizer_is_described_for_clients_without_one(client: httpx.Client) -> None:
    info = client.get("/tokenizer_info").raise_for_status().json()
    assert (info["bos_token"], info["eos_token"]) == ("<bos>", "<eos>")
    assert info["model_max_length"] == client.get("/v1/models/hash").json()["max_model_len"]


def test_tokenize_takes_llama_cpps_name_of_the_prompt(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"content": "abc"}).json()["tokens"]
    assert tokens == client.post("/tokenize", json={"prompt": "abc"}).json()["tokens"] != []
    both = client.post("/tokenize", json={"content": "abc", "prompt": "abc"})
    assert (both.status_code, both.json()["error"]["message"]) == (400, "send one of prompt, content and messages")


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_in_llama_cpps_place_is_followed(client: httpx.Client, kind: str) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}
    body = {"messages": USER, "max_tokens": 200, "response_format": {"type": kind, "schema": schema}}
    response = client.post(CHAT, json=body)
    assert "warning" not in response.headers
    assert json.loads(response.json()["choices"][0]["message"]["content"]) == {"a": 7}


@pytest.mark.parametrize(
    "sent", [{"type": "text", "schema": {}}, {"type": "json_schema", "schema": {}, "json_schema": {"name": "a"}}]
)
def test_a_schema_in_llama_cpps_place_excludes_another(client: httpx.Client, sent: dict[str, Any]) -> None:
    refused = client.post(CHAT, json={"messages": USER, "response_format": sent})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format.schema")
