"""Structured output of the real model, with a byte-level vocabulary of 49,152 tokens from a GGUF file."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from tests.serving import RunningServer

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
