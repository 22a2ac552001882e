"""Outputs that have to match something: every way to ask for it, whole and streamed, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema_rs
import openai
import pytest

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def _texts(client: httpx.Client, body: dict[str, Any]) -> list[str]:
    answer = client.post("/v1/completions", json={"prompt": "x", **body})
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [choice["text"] for choice in choices]


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-f]{4}-[0-9]+"}}, "[a-f]{4}-[0-9]+"),
        ({"guided_regex": "[a-f]{4}"}, "[a-f]{4}"),
        ({"structured_outputs": {"choice": ["yes", "no", 'per"haps\n']}}, 'yes|no|per"haps\n'),
        ({"guided_choice": ["ü", "😀"]}, "ü|😀"),
        ({"structured_outputs": {"grammar": 'start: "<" /[0-9]/+ ">"'}}, "<[0-9]+>"),
        ({"guided_grammar": 'root ::= "a" | "b" root'}, "b*a"),
    ],
)
@pytest.mark.parametrize("drawn", [{"temperature": 0}, {"seed": 1, "top_p": 0.7, "logprobs": 1, "presence_penalty": 1}])
def test_the_whole_output_matches(client: httpx.Client, field: dict, pattern: str, drawn: dict) -> None:
    """Also where the client says that nothing ends the text: its match does."""
    for text in _texts(client, {**field, **drawn, "n": 3, "ignore_eos": True, "min_tokens": 40, "max_tokens": 500}):
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    "field",
    [{"response_format": NAMED}, {"structured_outputs": {"json": SCHEMA}}, {"guided_json": json.dumps(SCHEMA)}],
)
def test_json_validates_against_its_schema(client: httpx.Client, field: dict) -> None:
    for text in _texts(client, {**field, "n": 4, "seed": 3, "max_tokens": 1000}):
        jsonschema_rs.validate(SCHEMA, json.loads(text))


def test_any_object_is_an_object(client: httpx.Client) -> None:
    for field in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        for text in _texts(client, {**field, "n": 3, "seed": 5, "max_tokens": 3000}):
            assert isinstance(json.loads(text), dict)


def test_a_stream_says_the_same(client: httpx.Client) -> None:
    body = {**CHAT, "response_format": NAMED, "seed": 8}
    whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == whole
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    jsonschema_rs.validate(SCHEMA, json.loads(whole))


def test_a_token_limit_cuts_and_says_so(client: httpx.Client) -> None:
    body = {"prompt": "x", "response_format": NAMED, "max_tokens": 5}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "length"


def test_a_schema_that_cannot_be_followed_is_refused_with_its_place(client: httpx.Client) -> None:
    wrong = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "whole"}}}}
    body = {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": wrong}}}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "response_format.json_schema.schema.properties.a.items"
    assert error["code"] == "invalid_grammar"
    assert "Invalid type: whole" in error["message"]


def test_the_official_client_parses_a_model(server) -> None:
    """Its own JSON schema, made from a class, goes there and back."""
    from pydantic import BaseModel

    class Step(BaseModel):
        done: bool
        count: int

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        answer = client.chat.completions.parse(
            model="hash", messages=[{"role": "user", "content": "hi"}], response_format=Step, seed=4
        )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Step)
