"""Tool calls through the official client: required, named, free, streamed, and sent back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Forecast", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
USER: list[Any] = [{"role": "user", "content": "How is Rome?"}]
STREAMS_MAX = 50
"""Streams of one request until one has more than a few deltas."""


@pytest.fixture(params=["server", "hash_server"])
def oai(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    """Once over one engine in this process, once over a prefill and a decode worker."""
    url = f"{request.getfixturevalue(request.param).url}/v1"
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("seed", range(3))
def test_a_named_tool_is_called_with_arguments_of_its_schema(oai: openai.OpenAI, seed: int) -> None:
    answer = oai.chat.completions.create(
        model="hash", messages=USER, tools=TOOLS, tool_choice=NAMED, seed=seed, n=2, temperature=1
    )
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "weather")
        jsonschema_rs.validate(PARAMETERS, json.loads(call.function.arguments))
    assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 2


def test_a_required_call_is_one_of_the_tools(oai: openai.OpenAI) -> None:
    names = set()
    for seed in range(6):
        answer = oai.chat.completions.create(
            model="hash", messages=USER, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed
        )
        (call,) = answer.choices[0].message.tool_calls
        names.add(call.function.name)
        schema = PARAMETERS if call.function.name == "weather" else {"type": "object", "maxProperties": 0}
        jsonschema_rs.validate(schema, json.loads(call.function.arguments))
    assert names == {"weather", "now"}


def test_a_stream_of_deltas_makes_the_same_call(oai: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "hash", "messages": USER, "tools": TOOLS, "tool_choice": NAMED, "seed": 7}
    whole = oai.chat.completions.create(**fields).choices[0].message.tool_calls[0]
    for _ in range(STREAMS_MAX):
        chunks = [chunk.choices[0] for chunk in oai.chat.completions.create(**fields, stream=True)]
        deltas = [part for chunk in chunks for part in chunk.delta.tool_calls or []]
        if len(deltas) > 3:
            break  # a busy server sends several tokens in one delta
    assert {part.index for part in deltas} == {0}
    assert [part.function.name for part in deltas if part.function.name] == ["weather"]
    assert len([part.id for part in deltas if part.id]) == 1
    assert len(deltas) > 3
    assert "".join(part.function.arguments for part in deltas) == whole.function.arguments
    assert chunks[0].delta.role == "assistant"
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == "tool_calls"


def test_the_clients_own_accumulator_reads_the_stream(oai: openai.OpenAI) -> None:
    with oai.chat.completions.stream(
        model="hash",
        messages=USER,
        tools=[{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}],
        tool_choice=NAMED,
        seed=3,
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    call = final.choices[0].message.tool_calls[0]
    jsonschema_rs.validate(PARAMETERS, call.function.parsed_arguments)


def test_calls_in_free_text_are_found_and_text_before_them_stays(oai: openai.OpenAI) -> None:
    """With tool_choice auto nothing is constrained: here a grammar stands in for a model that decides to call."""
    call = '<tool_call>\\n{\\"name\\": \\"now\\", \\"arguments\\": {}}\\n</tool_call>'
    for text, content, count in (("", None, 1), ("Wait. ", "Wait.", 1), ("Wait. ", "Wait.", 2)):
        grammar = f'start: "{text}' + "\\n".join([call] * count) + '"'
        fields: dict[str, Any] = {"model": "hash", "messages": USER, "tools": TOOLS}
        answer = oai.chat.completions.create(**fields, extra_body={"guided_grammar": grammar}, max_tokens=300)
        message = answer.choices[0].message
        assert (message.content, len(message.tool_calls)) == (content, count)
        assert answer.choices[0].finish_reason == "tool_calls"
        one = oai.chat.completions.create(
            **fields, extra_body={"guided_grammar": grammar}, max_tokens=300, parallel_tool_calls=False
        )
        assert len(one.choices[0].message.tool_calls) == 1
        off = oai.chat.completions.create(
            **fields, extra_body={"guided_grammar": grammar}, max_tokens=300, tool_choice="none"
        )
        assert off.choices[0].message.tool_calls is None
        assert off.choices[0].finish_reason == "stop"


def test_a_text_without_a_call_is_an_answer(oai: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "hash", "messages": USER, "seed": 4}
    answer = oai.chat.completions.create(**fields, tools=TOOLS, extra_body={"guided_choice": ["a < b <tool"]})
    assert answer.choices[0].message.content == "a < b <tool"
    assert answer.choices[0].finish_reason == "stop"
    assert "tool_calls" not in json.loads(answer.to_json())["choices"][0]["message"]


def test_a_call_that_was_cut_says_length(oai: openai.OpenAI) -> None:
    answer = oai.chat.completions.create(model="hash", messages=USER, tools=TOOLS, tool_choice=NAMED, max_tokens=45)
    assert answer.choices[0].finish_reason == "length"


def test_calls_and_results_go_back_into_the_conversation(oai: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "hash", "tools": TOOLS, "seed": 2}
    first = oai.chat.completions.create(**fields, messages=USER, tool_choice=NAMED)
    message = first.choices[0].message
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    second = oai.chat.completions.create(**fields, messages=[*USER, message, result], max_tokens=5)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert second.choices[0].finish_reason == "length"
