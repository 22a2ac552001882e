"""Bad requests: the right status, OpenAI's error body, and a server that goes on."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import msgspec
import pytest

from baton.compute.hash_engine import BYTE_TOKENS_FROM
from baton.serve.http.resume import SavedStream
from baton.serve.http.services import HttpSettings
from baton.serve.http.stream_marks import STREAM_TYPE

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]

BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 1}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, [2]]}, "prompt"),
    ({"prompt": [[1], 2]}, "prompt"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [259]}, "prompt"),
    ({"prompt": [2**40]}, "prompt[0]"),
    ({"prompt": [10**30]}, "prompt[0]"),
    ({"prompt": ["a"] * 33}, "prompt"),
    ({"prompt": "a", "n": 33}, "n"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": -1}, "n"),
    ({"prompt": "a", "n": True}, "n"),
    ({"prompt": "a", "n": 1.5}, "n"),
    ({"prompt": "a", "n": "2"}, "n"),
    ({"prompt": "a", "n": 2, "best_of": 3}, "best_of"),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**25}, "max_tokens"),
    ({"prompt": "a", "min_tokens": -1}, "min_tokens"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "temperature": 2.1}, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "temperature": [1]}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "top_p": 1.01}, "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "min_p": 1.5}, "min_p"),
    ({"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
    ({"prompt": "a", "frequency_penalty": -3}, "frequency_penalty"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"259": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": [1]}, "logit_bias"),
    ({"prompt": "a", "stop": ""}, "stop"),
    ({"prompt": "a", "stop": ["a"] * 17}, "stop"),
    ({"prompt": "a", "stop": [1]}, "stop[0]"),
    ({"prompt": "a", "stop": 7}, "stop"),
    ({"prompt": "a", "stop_token_ids": [259]}, "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"prompt": "a", "seed": 1.5}, "seed"),
    ({"prompt": "a", "seed": 2**64}, "seed"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "echo": 1}, "echo"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "stream_options": 1}, "stream_options"),
    ({"prompt": "a", "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
    ({"prompt": "a", "user": 5}, "user"),
    ({"prompt": "a", "cache_salt": 5}, "cache_salt"),
    ({"prompt": "a", "priority": "high"}, "priority"),
    ({"prompt": "a", "ignore_eos": "no"}, "ignore_eos"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
    ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"prompt": "a", "response_format": {"type": "json_object", "json_schema": {"name": "a"}}},
        "response_format.json_schema",
    ),
    (
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
        "response_format.json_schema.name",
    ),
    ({"prompt": "a", "structured_outputs": {}}, "structured_outputs"),
    ({"prompt": "a", "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"prompt": "a", "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"prompt": "a", "structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs.grammar"),
    ({"prompt": "a", "structured_outputs": {"json": "[1"}}, "structured_outputs.json"),
    ({"prompt": "a", "structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"prompt": "a", "guided_json": {"items": {"type": "integr"}}}, "guided_json.items"),
    ({"prompt": "a", "guided_json": "[" * 5000}, "guided_json"),
    ({"prompt": "a", "guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"prompt": "a", "guided_choice": ["x" * 4096] * 40}, "guided_choice"),
    ({"prompt": "a", "bad_words": [""]}, "bad_words[0]"),
    ({"prompt": "a", "bad_words": ["a"] * 65}, "bad_words"),
    ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
]

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
WRONG_TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "strin"}}}}},
]
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "tool_calls": CALLS}]}, "messages[0].content"),
    ({"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": USER, "tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"messages": USER, "tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
    ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
    ({"messages": USER, "tool_choice": "always"}, "tool_choice"),
    ({"messages": USER, "tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    (
        {"messages": USER, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
    ),
    ({"messages": USER, "tools": WRONG_TOOLS, "tool_choice": "required"}, "tools[0].function.parameters.properties.x"),
    (
        {"messages": USER, "tools": TOOLS, "tool_choice": "required", "structured_outputs": {"json_object": True}},
        "tool_choice",
    ),
    ({"messages": USER, "functions": [{}]}, "functions"),
    ({"messages": USER, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"messages": USER, "modalities": ["audio"]}, "modalities[0]"),
    ({"messages": USER, "audio": {"voice": "x"}}, "audio"),
    ({"messages": USER, "logprobs": 3}, "logprobs"),
    ({"messages": USER, "top_logprobs": 3}, "top_logprobs"),
    ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": USER, "max_tokens": -1}, "max_tokens"),
    ({"messages": USER, "reasoning_effort": 1}, "reasoning_effort"),
    ({"messages": USER, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
]


def check_error(response: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    """Every error has one shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["param"] == param
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "param"), BAD_COMPLETIONS)
def test_a_bad_completion_is_a_400_that_names_the_field(
    client: httpx.Client, body: dict[str, Any], param: str, *, stream: bool
) -> None:
    check_error(client.post(COMPLETIONS, json={"stream": stream} | body), 400, param)


@pytest.mark.parametrize(("body", "param"), BAD_CHATS)
def test_a_bad_chat_is_a_400_that_names_the_field(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    error = check_error(client.post(CHAT, json=body), 400, param)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/cluster/workers/inprocess-0/role"])
@pytest.mark.parametrize(
    "raw", [b"", b"{", b"null", b"[]", b'"a"', b"\xff\xfe", b'{"prompt": "\xc3("}', b'{"a": NaN}', b"[" * 50_000]
)
def test_what_is_no_json_object_is_a_400(client: httpx.Client, path: str, raw: bytes) -> None:
    response = client.post(path, content=raw, headers={"content-type": "application/json"})
    check_error(response, 400, None)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_another_model_is_a_404(client: httpx.Client, path: str) -> None:
    body = {"model": "gpt-9", "tokens": [5]} if path == "/detokenize" else {"model": "gpt-9", "prompt": "a"}
    if path == CHAT:
        body = {"model": "gpt-9", "messages": USER}
    assert check_error(client.post(path, json=body), 404, "model")["code"] == "model_not_found"


def test_an_unknown_path_is_a_404(client: httpx.Client) -> None:
    for path in ("/v1", "/v1/completions/", "/v1/images", "/ui/x", "/..%2fetc"):
        check_error(client.get(path), 404, None)


def test_a_wrong_method_is_a_405_that_says_what_is_allowed(client: httpx.Client) -> None:
    assert check_allowed(client.get(COMPLETIONS)) == {"POST"}
    assert check_allowed(client.delete("/v1/models")) == {"GET", "HEAD"}


def check_allowed(response: httpx.Response) -> set[str]:
    check_error(response, 405, None)
    return {method.strip() for method in response.headers["allow"].split(",")}


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_that_says_it_is_no_json_is_a_415(client: httpx.Client, kind: str) -> None:
    response = client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": kind})
    check_error(response, 415, None)


def test_a_compressed_body_is_a_415(client: httpx.Client) -> None:
    check_error(client.post(COMPLETIONS, json={"prompt": "a"}, headers={"content-encoding": "gzip"}), 415, None)


def test_ten_megabytes_are_a_413_that_the_client_gets(client: httpx.Client) -> None:
    """A client that first sends everything and then reads still finds the answer, and the connection lives on."""
    error = check_error(client.post(COMPLETIONS, json={"prompt": "a" * 10_000_000}), 413, None)
    assert "10000013" in error["message"]
    assert str(4 * 1024 * 1024) in error["message"]
    assert client.get("/health").status_code == 200


def test_a_large_body_without_a_length_is_a_413_once_too_much_has_come(client: httpx.Client) -> None:
    chunks = (b"x" * 65536 for _ in range(100))
    check_error(client.post(COMPLETIONS, content=chunks, headers={"content-type": "application/json"}), 413, None)


def test_a_body_that_was_announced_too_large_is_refused_before_it_comes(server) -> None:
    """The head alone is enough: the body is not waited for."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        head = [
            "POST /v1/completions HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            "Content-Length: 99999999",
        ]
        connection.sendall("\r\n".join([*head, "", ""]).encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(client: httpx.Client) -> None:
    error = check_error(client.post(COMPLETIONS, json={"prompt": "a" * 4096}), 400, "prompt")
    assert error["code"] == "context_length_exceeded"
    assert "4096 tokens" in error["message"]
    assert "at most 4095" in error["message"]


def test_max_tokens_beyond_the_context_are_cut_to_what_fits(client: httpx.Client) -> None:
    body = {"prompt": "a" * 4090, "max_tokens": 100, "ignore_eos": True, "logit_bias": {}}
    answer = client.post(COMPLETIONS, json=body).json()
    assert answer["usage"]["total_tokens"] <= 4096


def test_a_body_of_exactly_the_bound_is_read(build, serve) -> None:
    body = b'{"prompt": "a"}'
    client = serve(build(settings=HttpSettings(body_bytes_max=len(body))))
    kind = {"content-type": "application/json"}
    assert client.post(COMPLETIONS, content=body, headers=kind).status_code == 200
    check_error(client.post(COMPLETIONS, content=body + b" ", headers=kind), 413, None)


def test_a_carried_stream_has_no_larger_body_than_a_request(build, serve) -> None:
    body, start = b'{"prompt": "a"}' + b" " * 1000, {"response_id": "cmpl-1", "seed": 1, "prompt_hash": b""}
    stream = SavedStream(path="", owner="", body=body, output=(70,), expires_unix_s=0, **start)
    client = serve(build(settings=HttpSettings(body_bytes_max=1000)))
    sent = msgspec.msgpack.encode(stream)
    check_error(client.post(COMPLETIONS, content=sent, headers={"content-type": STREAM_TYPE}), 413, None)


def test_a_full_queue_is_a_503_that_says_when_to_come_again(build, serve) -> None:
    client = serve(build(waiting_max=0))
    for stream in (False, True):
        response = client.post(COMPLETIONS, json={"prompt": "a", "stream": stream})
        error = check_error(response, 503, None)
        assert error["code"] == "queue_full"
        assert response.headers["retry-after"] == "1"


def test_prompts_are_counted_before_they_are_tokenized(client: httpx.Client) -> None:
    """A million prompts of one letter took 90 s of CPU time until they were refused."""
    refused = client.post(COMPLETIONS, json={"prompt": ["a"] * 40 + [[259]]})
    assert refused.json()["error"]["message"].startswith("41 prompts with n=1 make 41 choices")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": ["a", "a b"]}),
        (CHAT, {"messages": [{"role": "user", "content": "a b"}]}),
        ("/v1/embeddings", {"input": "a b"}),
        ("/v1/responses", {"input": "a b"}),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "a b"}]}),
    ],
)
def test_a_text_with_a_token_beyond_the_embedding_table_is_a_400(build, serve, path: str, body: dict[str, Any]) -> None:
    """A fine-tune adds tokens to its vocabulary and not to its table. The engine cannot compute a step with them."""
    house = build()
    house.gateway.card = msgspec.structs.replace(house.gateway.card, vocab_tokens=BYTE_TOKENS_FROM + ord("z"))
    client = serve(house)
    assert client.post(path, json=body).status_code == 200
    refused = client.post(
        path, content=json.dumps(body).replace("a b", "a z"), headers={"content-type": "application/json"}
    )
    assert refused.status_code == 400
    assert "the token 'z', for which the model has no embedding" in refused.json()["error"]["message"]
