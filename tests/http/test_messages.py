"""Anthropic's Messages API, at the level of the wire."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from baton.serve.http.choice import ChoiceDelta
from baton.serve.http.identity import Keyring, KeySources
from baton.serve.http.tools.formats import HERMES
from baton.serve.http.tools.parser import CallPart, ToolParser
from baton.serve.http.wire.encoders import ResponseHead, WholeChoice
from baton.serve.http.wire.messages import MessagesRequest, chat_request
from baton.serve.http.wire.messages_encoder import MessagesEncoder
from baton.serve.http.wire.parsing import convert
from baton.serve.http.wire.responses import PromptTokensDetails, Usage
from baton.serve.live.live_request import Timings
from tests.http.conftest import House

HELLO = {"model": "hash", "max_tokens": 12, "temperature": 0, "messages": [{"role": "user", "content": "Hello"}]}
TOOL = {"name": "look_up", "description": "Look it up.", "input_schema": {"type": "object", "properties": {}}}


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and the data of every event. The data repeats the name."""
    found: list[tuple[str, dict[str, Any]]] = []
    for part in text.strip().split("\n\n"):
        name, data = part.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in found)
    return found


def test_a_message_says_what_a_chat_says(client: httpx.Client) -> None:
    chat = client.post("/v1/chat/completions", json=HELLO).json()
    message = client.post("/v1/messages", json=HELLO).json()
    assert message["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "hash")
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == 12
    assert message["timings"]["ttft_s"] > 0


def test_a_stream_has_anthropics_events(client: httpx.Client) -> None:
    whole = client.post("/v1/messages", json=HELLO).json()
    response = client.post("/v1/messages", json={**HELLO, "stream": True}, headers={"x-request-id": "one"})
    start, opened, *deltas, closed, ended, stopped = events(response.text)
    assert start[1]["message"]["id"] == "msg_one"
    assert start[1]["message"]["usage"]["input_tokens"] > 0
    assert (opened[0], opened[1]["index"], opened[1]["content_block"]) == (
        "content_block_start",
        0,
        {"type": "text", "text": ""},
    )
    assert {name for name, _ in deltas} == {"content_block_delta"}
    assert "".join(data["delta"]["text"] for _, data in deltas) == whole["content"][0]["text"]
    assert (closed[0], ended[0], stopped[0]) == ("content_block_stop", "message_delta", "message_stop")
    assert ended[1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert ended[1]["usage"]["output_tokens"] == 12


def test_a_stop_sequence_is_named(client: httpx.Client) -> None:
    text = client.post("/v1/messages", json=HELLO).json()["content"][0]["text"]
    body = {**HELLO, "stop_sequences": ["never this", text[2:4]]}
    message = client.post("/v1/messages", json=body).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", text[2:4])
    assert message["content"][0]["text"] == text[: text.index(text[2:4])]
    *_, ended, _ = events(client.post("/v1/messages", json={**body, "stream": True}).text)
    assert ended[1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": text[2:4]}


def test_counted_tokens_are_those_of_the_prompt(client: httpx.Client) -> None:
    body = {"system": "Be brief.", "messages": HELLO["messages"]}
    counted = client.post("/v1/messages/count_tokens", json=body).json()
    usage = client.post("/v1/messages", json={**HELLO, **body}).json()["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, "max_tokens must be"),
        ({"model": "claude"}, "'claude' is not served here"),
        ({"messages": [{"role": "assistant", "content": "I"}]}, "does not continue an answer"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type must be"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is required"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "the user has no tool_use"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name is required"),
    ],
)
def test_errors_have_anthropics_form(client: httpx.Client, change: dict[str, Any], words: str) -> None:
    response = client.post("/v1/messages", json={**HELLO, **change})
    assert response.status_code in (400, 404)
    body = response.json()
    assert body["type"] == "error"
    assert words in body["error"]["message"]


def test_errors_before_the_route_have_anthropics_form_too(
    client: httpx.Client, build: Callable[..., House], serve: Callable[[House], httpx.Client]
) -> None:
    locked = serve(build(keys=KeySources(api_keys=("secret",))))
    for response, status in ((locked.post("/v1/messages", json=HELLO), 401), (client.get("/v1/messages"), 405)):
        assert (response.status_code, response.json().get("type")) == (status, "error")


def test_a_conversation_with_tools_becomes_the_same_chat() -> None:
    body = {
        **HELLO,
        "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief.", "cache_control": {}}],
        "tools": [TOOL],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "metadata": {"user_id": "someone"},
        "messages": [
            {"role": "user", "content": "What is it?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "look_up", "input": {"what": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "gone", "is_error": True},
                    {"type": "text", "text": "Well?"},
                ],
            },
        ],
    }
    chat = chat_request(convert(body, MessagesRequest))
    shown = [(message.role, message.content, message.tool_call_id) for message in chat.messages]
    assert [(role, content if isinstance(content, str) else content[0].text, of) for role, content, of in shown] == [
        ("system", "Be brief.", None),
        ("user", "What is it?", None),
        ("assistant", "I look.", None),
        ("tool", "Error: gone", "t1"),
        ("user", "Well?", None),
    ]
    [call] = chat.messages[2].tool_calls
    assert (call.id, call.function.name, json.loads(call.function.arguments)) == ("t1", "look_up", {"what": 1})
    assert (chat.tool_choice, chat.parallel_tool_calls, chat.user) == ("required", False, "someone")
    assert chat.tools[0].function.parameters == TOOL["input_schema"]


USAGE = Usage(
    prompt_tokens=9, completion_tokens=3, total_tokens=12, prompt_tokens_details=PromptTokensDetails(cached_tokens=4)
)
CALLS = (
    CallPart(0, "", id="a", name="look_up"),
    CallPart(0, '{"x":'),
    CallPart(0, "1}"),
    CallPart(1, "[", id="b", name="look_up"),
)


def head() -> ResponseHead:
    return ResponseHead(id="msg_1", created=0, model="m", prompt_tokens=9, include_usage=True)


def test_calls_are_blocks_of_their_own() -> None:
    """Also if text and calls take turns, and parts of two calls come in one delta."""
    encoder = MessagesEncoder(head())
    parts = [
        encoder.delta(0, ChoiceDelta("I look."), first=True),
        encoder.delta(0, ChoiceDelta("", calls=CALLS[:2]), first=False),
        encoder.delta(0, ChoiceDelta("", calls=CALLS[2:]), first=False),
        encoder.last(0, "tool_calls", Timings()),
        encoder.usage(USAGE, Timings()),
        encoder.end(USAGE, Timings()),
    ]
    found = events(b"".join(parts).decode())
    assert [(name, data.get("index")) for name, data in found] == [
        ("message_start", None),
        *(("content_block_" + kind, 0) for kind in ("start", "delta", "stop")),
        *(("content_block_" + kind, 1) for kind in ("start", "delta", "delta", "stop")),
        *(("content_block_" + kind, 2) for kind in ("start", "delta", "stop")),
        ("message_delta", None),
        ("message_stop", None),
    ]
    opened = [data["content_block"] for name, data in found if name == "content_block_start"]
    assert opened[1] == {"type": "tool_use", "id": "a", "name": "look_up", "input": {}}
    written = [data["delta"].get("partial_json", "") for name, data in found if name == "content_block_delta"]
    assert "".join(written) == '{"x":1}['
    assert found[-2][1]["usage"]["input_tokens"] == 5
    assert found[-2][1]["delta"]["stop_reason"] == "tool_use"


def test_text_behind_a_call_does_not_open_the_call_again() -> None:
    """The end of a call and the text after it come in one delta if a client reads slowly, or with drafts."""
    encoder, parser = MessagesEncoder(head()), ToolParser(HERMES, name="seed")
    texts = ('<tool_call>{"name": "look_up", "arguments": {"x": ', "1}}</tool_call>Done.")
    parsed = [parser.push(text) for text in texts]
    sent = [encoder.delta(0, ChoiceDelta(each.text, calls=each.parts), first=False) for each in parsed]
    shown = [data.get("content_block") or data.get("delta") for _, data in events(b"".join(sent).decode())]
    call, *arguments, closed, begun, text = shown
    assert (call["name"], "".join(each["partial_json"] for each in arguments)) == ("look_up", '{"x": 1}')
    assert (closed, begun["type"], text["text"]) == (None, "text", "Done.")


def test_a_whole_answer_has_the_arguments_as_objects() -> None:
    choice = WholeChoice(0, "", (), "stop", CALLS, "tool_calls")
    message = json.loads(MessagesEncoder(head()).whole([choice], USAGE, Timings()))
    assert [block["input"] for block in message["content"]] == [{"x": 1}, {}]
    assert message["stop_reason"] == "tool_use"


def test_a_key_may_come_as_anthropics_clients_send_it() -> None:
    keyring = Keyring(KeySources(api_keys=("first", "second")))
    assert keyring.identify({b"x-api-key": b"second"}).tenant == "key-1"
    assert keyring.identify({b"x-api-key": b"second", b"authorization": b"Bearer first"}).tenant == "key-0"
