"""OpenAI's Responses API: the official client, and what it does not show."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseStreamEvent as AnyEvent
from pydantic import TypeAdapter

from baton.core.errors import RequestError
from baton.serve.http.choice import ChoiceDelta
from baton.serve.http.stored_responses import Conversation, StoredResponses
from baton.serve.http.tools.parser import CallPart
from baton.serve.http.wire.encoders import ResponseHead, WholeChoice
from baton.serve.http.wire.parsing import convert
from baton.serve.http.wire.response_api import ResponsesRequest, chat_messages, chat_request
from baton.serve.http.wire.response_api_encoder import ResponsesEncoder
from baton.serve.http.wire.responses import PromptTokensDetails, Usage
from baton.serve.http.wire.schemas import ChatMessage
from baton.serve.live.live_request import Timings

HELLO: dict[str, Any] = {"model": "hash", "input": "Hello", "max_output_tokens": 12, "temperature": 0}
ResponseStreamEvent: TypeAdapter[Any] = TypeAdapter(AnyEvent)
CALLS = (CallPart(0, "", id="a", name="look_up"), CallPart(0, '{"x":'), CallPart(0, "1}"))
USAGE = Usage(
    prompt_tokens=9, completion_tokens=3, total_tokens=12, prompt_tokens_details=PromptTokensDetails(cached_tokens=4)
)


@pytest.fixture
def oai(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_a_response_says_what_a_chat_says(oai: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    chat = oai.chat.completions.create(model="hash", messages=messages, max_tokens=12, temperature=0)
    response = oai.responses.create(**HELLO, instructions="Be brief.")
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == 12
    assert response.id.startswith("resp_")


def test_a_stream_ends_with_the_whole_response(oai: openai.OpenAI) -> None:
    whole = oai.responses.create(**HELLO)
    events = list(oai.responses.create(**HELLO, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(names[4:-4]) == {"output_text.delta"}
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == whole.output_text


def test_a_response_goes_on_after_an_earlier_one(oai: openai.OpenAI) -> None:
    """Its prompt is that of the same conversation as a chat. Instructions are not carried over."""
    first = oai.responses.create(**HELLO, instructions="Be brief.")
    second = oai.responses.create(**{**HELLO, "input": "And?"}, previous_response_id=first.id)
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And?"},
    ]
    chat = oai.chat.completions.create(model="hash", messages=messages, max_tokens=12, temperature=0)
    assert (second.output_text, second.usage.input_tokens) == (
        chat.choices[0].message.content,
        chat.usage.prompt_tokens,
    )
    given_back = oai.responses.create(
        model="hash",
        input=[{"role": "user", "content": "Hello"}, *first.output, {"role": "user", "content": "And?"}],
        max_output_tokens=12,
        temperature=0,
    )
    assert given_back.output_text == second.output_text


def test_a_response_that_is_not_stored_cannot_be_continued(oai: openai.OpenAI) -> None:
    first = oai.responses.create(**HELLO, store=False)
    with pytest.raises(openai.NotFoundError, match="unless `store` is false") as caught:
        oai.responses.create(**HELLO, previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": []}, "input must be"),
        ({"input": [{"role": "user"}]}, "input[0].content is required"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id is required"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type must be"),
        ({"background": True}, "background is not supported"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema is required"),
        ({"tool_choice": "required"}, "there are 0 tools"),
    ],
)
def test_bad_input_is_named(client: httpx.Client, change: dict[str, Any], words: str) -> None:
    refused = client.post("/v1/responses", json={**HELLO, **change})
    assert (refused.status_code, words in refused.json()["error"]["message"]) == (400, True), refused.text


def test_a_conversation_with_tools_becomes_the_same_chat() -> None:
    body = {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "What is it?"}]},
            {"type": "reasoning", "id": "r", "summary": []},
            {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "look_up", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {"type": "function_call_output", "call_id": "c2", "output": "two"},
        ],
        "tools": [{"type": "function", "name": "look_up", "parameters": {"type": "object"}, "strict": True}],
        "tool_choice": {"type": "function", "name": "look_up"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    }
    asked = convert(body, ResponsesRequest)
    chat = chat_request(asked, chat_messages(asked))
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "tool"]
    assert [call.id for call in chat.messages[1].tool_calls] == ["c1", "c2"]
    assert [message.tool_call_id for message in chat.messages[2:]] == ["c1", "c2"]
    assert (chat.tool_choice.function.name, chat.tools[0].function.name) == ("look_up", "look_up")
    assert chat.response_format.json_schema.schema == {"type": "object"}


def encoder(stored: StoredResponses) -> ResponsesEncoder:
    head = ResponseHead(id="resp_1", created=0, model="m", include_usage=True)
    asked = ChatMessage(role="user", content="Look.")
    conversation = Conversation(stored=stored, owner="me", messages=(asked,), is_stored=True)
    return ResponsesEncoder(head, ResponsesRequest(input="Look."), conversation)


def test_text_behind_a_call_does_not_open_the_call_again() -> None:
    streaming = encoder(StoredResponses())
    streaming.delta(0, ChoiceDelta("", calls=CALLS[:2]), first=True)
    streaming.delta(0, ChoiceDelta("Done.", calls=CALLS[2:]), first=False)
    streaming.last(0, "tool_calls", Timings())
    ended = json.loads(streaming.usage(USAGE, Timings()).decode().split("data: ")[1])
    call, message = ended["response"]["output"]
    assert (call["name"], call["arguments"], message["content"][0]["text"]) == ("look_up", '{"x":1}', "Done.")


def test_text_and_calls_are_items_and_are_stored() -> None:
    stored = StoredResponses()
    streaming = encoder(stored)
    stream = b"".join(
        [
            streaming.delta(0, ChoiceDelta("I look."), first=True),
            streaming.delta(0, ChoiceDelta("", calls=CALLS[:2]), first=False),
            streaming.delta(0, ChoiceDelta("", calls=CALLS[2:]), first=False),
            streaming.last(0, "tool_calls", Timings()),
            streaming.usage(USAGE, Timings()),
        ]
    ).decode()
    events = [json.loads(part.split("data: ")[1]) for part in stream.strip().split("\n\n")]
    [called] = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert (called["arguments"], called["item_id"], called["output_index"]) == ('{"x":1}', "fc_a", 1)
    message, call = events[-1]["response"]["output"]
    assert (message["content"][0]["text"], call["arguments"]) == ("I look.", '{"x":1}')
    assert {message["status"], call["status"], events[-1]["response"]["status"]} == {"completed"}
    whole = json.loads(
        encoder(stored).whole([WholeChoice(0, "I look.", (), "stop", CALLS, "tool_calls")], USAGE, Timings())
    )
    assert whole["output"] == [message, call]
    asked, answer = stored.get("me", "resp_1")
    assert (asked.content, answer.content, answer.tool_calls[0].function.arguments) == ("Look.", "I look.", '{"x":1}')


def test_stored_responses_are_bounded_and_belong_to_their_owner() -> None:
    stored, said = StoredResponses(responses_max=2, bytes_max=1000), [ChatMessage(role="user", content="hi")]
    for name in ("a", "b"):
        stored.put("me", name, said, name.encode())
    stored.get("me", "a")
    stored.put("me", "c", said, b"c")
    with pytest.raises(RequestError, match="the latest 2"):
        stored.get("me", "b")  # the one that was unused for longest
    with pytest.raises(RequestError):
        stored.get("other", "a")
    assert stored.get("me", "a") == tuple(said)
    assert stored.body("me", "a") == b"a"
    stored.put("me", "d", [ChatMessage(role="user", content="x" * 2000)], b"d")
    with pytest.raises(RequestError):
        stored.get("me", "d")  # it alone is above the limit
    long = [ChatMessage(role="user", content="x" * 940)]
    stored.put("me", "e", long, b"e")
    assert stored.get("me", "e") == tuple(long)
    with pytest.raises(RequestError):
        stored.get("me", "c")
    stored.delete("me", "e")
    stored.put("me", "f", said, b"f" * 2000)
    with pytest.raises(RequestError, match="there is no response 'f'"):
        stored.body("me", "f")  # its body is above the limit


def test_stored_conversations_take_no_more_memory_than_is_counted() -> None:
    """As objects, these messages would take five times their bytes."""
    stored, count, names = StoredResponses(bytes_max=1 << 20), 3000, range(14)
    tracemalloc.start()
    for name in names:
        said = [ChatMessage(role="user", content=str(number)) for number in range(count)]
        stored.put("me", str(name), said, b"{}")
        del said
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < 2 * (1 << 20)
    assert len(stored.get("me", str(names[-1]))) == count


def test_a_response_is_read_and_deleted_by_its_id(oai: openai.OpenAI) -> None:
    made = oai.responses.create(**HELLO)
    assert oai.responses.retrieve(made.id) == made
    oai.responses.delete(made.id)
    for gone in (lambda: oai.responses.retrieve(made.id), lambda: oai.responses.delete(made.id)):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            gone()
    *_, last = oai.responses.create(**HELLO, stream=True)
    assert oai.responses.retrieve(last.response.id) == last.response
    unkept = oai.responses.create(**HELLO, store=False)
    with pytest.raises(openai.NotFoundError):
        oai.responses.retrieve(unkept.id)


def test_the_input_of_a_response_is_listed(oai: openai.OpenAI) -> None:
    """The conversation before it, the newest first, with that of earlier responses. Pages are found by their ids."""
    call = {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": "{}"}
    given = [
        {"role": "user", "content": "What?"},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
    ]
    first = oai.responses.create(**{**HELLO, "input": given})
    second = oai.responses.create(**{**HELLO, "input": "And?"}, previous_response_id=first.id)
    listed = list(oai.responses.input_items.list(second.id, order="asc", limit=2))
    kinds = ["message", "function_call", "function_call_output", "message", "message"]
    assert [item.type for item in listed] == kinds
    assert (listed[0].content[0].text, listed[2].output, listed[4].content[0].text) == ("What?", "one", "And?")
    assert (listed[3].role, listed[3].content[0].text) == ("assistant", first.output_text)
    assert len({item.id for item in listed}) == 5
    assert [item.id for item in oai.responses.input_items.list(second.id)] == [item.id for item in listed[::-1]]
    with pytest.raises(openai.NotFoundError, match="there is no response 'resp_none'"):
        oai.responses.input_items.list("resp_none")
    huge = f"{'0' * 10}{'9' * 5000}"
    for query, words in (
        ({"limit": 101}, "limit must be"),
        ({"limit": huge}, "limit must be"),
        ({"order": "up"}, "order must be"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            oai.responses.input_items.list(second.id, extra_query=query)


def test_tokens_of_an_input_are_counted_without_an_answer(oai: openai.OpenAI) -> None:
    made = oai.responses.create(**HELLO)
    assert oai.responses.input_tokens.count(model="hash", input="Hello").input_tokens == made.usage.input_tokens
    later = oai.responses.create(**{**HELLO, "input": "And?"}, previous_response_id=made.id)
    counted = oai.responses.input_tokens.count(model="hash", input="And?", previous_response_id=made.id)
    assert counted.input_tokens == later.usage.input_tokens


def test_a_response_may_go_on_without_input(oai: openai.OpenAI) -> None:
    made = oai.responses.create(**HELLO)
    again = oai.responses.create(model="hash", previous_response_id=made.id, max_output_tokens=4)
    assert again.usage.input_tokens > made.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="input is required"):
        oai.responses.create(model="hash")


def test_a_forced_call_does_not_follow_the_format_of_an_answer(oai: openai.OpenAI, client: httpx.Client) -> None:
    """Frameworks send both. A constraint by vLLM's fields is no format, and contradicts the call."""
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    tool = {"type": "function", "name": "look_up", "parameters": schema, "strict": True}
    answer = {"format": {"type": "json_schema", "name": "answer", "schema": {"type": "object"}}}
    called = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200}
    response = oai.responses.create(**{**HELLO, **called}, text=answer)
    [item] = response.output
    assert (item.type, json.loads(item.arguments)["x"] in (1, 2)) == ("function_call", True)
    function = {"type": "function", "function": {"name": "look_up", "parameters": schema}}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "tools": [function], "tool_choice": "required"}
    refused = client.post("/v1/chat/completions", json={**chat, "structured_outputs": {"choice": ["a"]}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


def test_reasoning_is_an_item_before_the_answer() -> None:
    stored, deltas = StoredResponses(), [ChoiceDelta("", reasoning="I th"), ChoiceDelta("Yes", reasoning="ink.")]
    streaming = encoder(stored)
    stream = b"".join(
        [
            *(streaming.delta(0, delta, first=not index) for index, delta in enumerate(deltas)),
            streaming.last(0, "stop", Timings()),
            streaming.usage(USAGE, Timings()),
        ]
    ).decode()
    events = [json.loads(part.split("data: ")[1]) for part in stream.strip().split("\n\n")]
    names = [event["type"].removeprefix("response.") for event in events[2:]]
    assert names == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    reasoning, message = events[-1]["response"]["output"]
    assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "I think.")
    assert message["content"][0]["text"] == "Yes"
    choice = WholeChoice(0, "Yes", (), "stop", (), "stop", reasoning="I think.")
    assert json.loads(encoder(stored).whole([choice], USAGE, Timings()))["output"] == [reasoning, message]
    assert stored.get("me", "resp_1")[-1].content == "Yes"
    for event in events:
        ResponseStreamEvent.validate_python(event)
