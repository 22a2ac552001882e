"""Chats with `store: true` are listed, read, changed and deleted by OpenAI's client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from msgspec import json

from baton.core.errors import RequestError
from baton.serve.http.choice import ChoiceDelta
from baton.serve.http.identity import KeySources
from baton.serve.http.stored_responses import Conversation, StoredResponses
from baton.serve.http.tools.parser import CallPart
from baton.serve.http.wire.encoders import ResponseHead, StoredChatEncoder
from baton.serve.http.wire.responses import PromptTokensDetails, Usage
from baton.serve.http.wire.schemas import ChatMessage
from baton.serve.live.live_request import Timings
from tests.http.conftest import House

HELLO: dict[str, Any] = {
    "model": "hash",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    "max_tokens": 12,
    "temperature": 0,
}
USAGE = Usage(
    prompt_tokens=9, completion_tokens=3, total_tokens=12, prompt_tokens_details=PromptTokensDetails(cached_tokens=4)
)


@pytest.fixture
def locked(build: Callable[..., House], serve: Callable[[House], httpx.Client]) -> str:
    """The URL of a server with the keys `a` and `b`, each of a tenant of its own."""
    return f"{serve(build(keys=KeySources(api_keys=('a', 'b')))).base_url}/v1"


@pytest.fixture
def oai(locked: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=locked, api_key="a", max_retries=0) as client:
        yield client


def test_a_stored_chat_is_read_changed_and_deleted(oai: openai.OpenAI) -> None:
    made = oai.chat.completions.create(**HELLO, store=True, metadata={"topic": "greeting"}, n=2, logprobs=True)
    assert oai.chat.completions.retrieve(made.id) == made
    changed = oai.chat.completions.update(made.id, metadata={"topic": "other"})
    assert changed.to_dict()["metadata"] == {"topic": "other"}
    assert (changed.choices, changed.usage) == (made.choices, made.usage)
    assert oai.chat.completions.retrieve(made.id) == changed
    assert oai.chat.completions.delete(made.id).deleted
    for gone in (oai.chat.completions.retrieve, oai.chat.completions.delete, oai.chat.completions.messages.list):
        with pytest.raises(openai.NotFoundError, match="if `store` is true"):
            gone(made.id)
    with pytest.raises(openai.NotFoundError):
        oai.chat.completions.update(made.id, metadata={})
    with pytest.raises(openai.BadRequestError, match="metadata is required"):
        oai.post(f"/chat/completions/{made.id}", body={}, cast_to=object)


def test_a_stream_is_stored_as_the_same_chat_that_is_not_streamed(oai: openai.OpenAI) -> None:
    whole = oai.chat.completions.create(**HELLO, logprobs=True, top_logprobs=1, n=2, seed=1)
    chunks = list(
        oai.chat.completions.create(**HELLO, logprobs=True, top_logprobs=1, n=2, seed=1, stream=True, store=True)
    )
    stored = oai.chat.completions.retrieve(chunks[0].id)
    assert stored.choices == whole.choices
    assert stored.usage.completion_tokens == whole.usage.completion_tokens == 24


def test_only_chats_that_asked_for_it_are_stored(oai: openai.OpenAI) -> None:
    for asked in ({}, {"store": False}):
        made = oai.chat.completions.create(**HELLO, **asked)
        with pytest.raises(openai.NotFoundError, match="the latest 1024"):
            oai.chat.completions.retrieve(made.id)
    assert oai.chat.completions.list().data == []


def test_stored_chats_are_listed_in_pages_and_by_their_labels(oai: openai.OpenAI, locked: str) -> None:
    made = [oai.chat.completions.create(**HELLO, store=True, metadata={"turn": turn}) for turn in ("1", "2", "1")]
    first, second, third = (chat.id for chat in made)
    chats = oai.chat.completions
    assert [chat.id for chat in chats.list(limit=1)] == [first, second, third]
    assert [chat.id for chat in chats.list(order="desc", after=third)] == [second, first]
    assert [chat.id for chat in chats.list(metadata={"turn": "1"})] == [first, third]
    assert [chat.id for chat in chats.list(metadata={"turn": "1", "other": "1"})] == []
    assert len(chats.list(model="hash").data) == 3
    assert chats.list(model="other").data == []
    chats.update(first, metadata={"turn": "4"})
    assert [chat.id for chat in chats.list()] == [first, second, third]
    with openai.OpenAI(base_url=locked, api_key="b", max_retries=0) as other:
        assert other.chat.completions.list().data == []
        with pytest.raises(openai.NotFoundError):
            other.chat.completions.retrieve(first)
        with pytest.raises(openai.NotFoundError):
            other.chat.completions.delete(first)


def test_the_messages_of_a_stored_chat_are_listed(oai: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "And "}, {"type": "text", "text": "you?"}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *HELLO["messages"],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "user", "content": parts},
    ]
    made = oai.chat.completions.create(**{**HELLO, "messages": messages}, store=True)
    listed = list(oai.chat.completions.messages.list(made.id, limit=2))
    assert [message.role for message in listed] == ["system", "user", "assistant", "tool", "user"]
    assert [message.content for message in listed] == ["Be brief.", "Hello", None, "1", None]
    assert listed[2].tool_calls[0].function.name == "f"
    assert [part.text for part in listed[4].content_parts] == ["And ", "you?"]
    assert [message.id for message in listed] == [f"{made.id}-{index}" for index in range(5)]


def test_the_path_names_its_methods(locked: str) -> None:
    with httpx.Client(headers={"authorization": "Bearer a"}) as client:
        refused = client.put(f"{locked}/chat/completions", json={})
        assert (refused.status_code, set(refused.headers["allow"].split(", "))) == (405, {"GET", "HEAD", "POST"})


def stored_by(encoder: StoredChatEncoder, stored: StoredResponses) -> Any:
    encoder.last(0, "tool_calls", Timings())
    encoder.end(USAGE, Timings())
    return json.decode(stored.body("me", "chatcmpl-1"))


def stored_encoder(stored: StoredResponses) -> StoredChatEncoder:
    head = ResponseHead(id="chatcmpl-1", created=0, model="m", include_usage=False)
    asked = ChatMessage(role="user", content="Look.")
    conversation = Conversation(stored=stored, owner="me", messages=(asked,), is_stored=True)
    # the tokenizer turns log probabilities into text, and there are none
    return StoredChatEncoder(head, None, with_logprobs=False, conversation=conversation, metadata={})  # pyright: ignore


def test_calls_and_reasoning_of_a_stream_are_stored() -> None:
    stored = StoredResponses()
    encoder = stored_encoder(stored)
    encoder.delta(0, ChoiceDelta("", reasoning="Hm"), first=True)
    encoder.delta(0, ChoiceDelta("I ", calls=(CallPart(0, "", id="a", name="look_up"),)), first=False)
    encoder.delta(0, ChoiceDelta("look.", calls=(CallPart(0, '{"x":'), CallPart(0, "1}"))), first=False)
    [choice] = stored_by(encoder, stored)["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I look.")
    assert choice["message"]["reasoning_content"] == "Hm"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "look_up", "arguments": '{"x":1}'}


def test_the_second_part_of_a_resumed_stream_is_not_stored() -> None:
    stored = StoredResponses(kind="chat", rule="if `store` is true")
    encoder = stored_encoder(stored)
    encoder.delta(0, ChoiceDelta("the end"), first=False)
    with pytest.raises(RequestError, match="there is no chat"):
        stored_by(encoder, stored)


def test_a_change_counts_as_size() -> None:
    stored = StoredResponses(bytes_max=200)
    for name in ("a", "b"):
        stored.put("me", name, (), b"x" * 60)
    stored.change("me", "b", b"y" * 150)
    assert stored.bodies("me") == [b"y" * 150]
    stored.change("me", "b", b"y")
    stored.put("me", "c", (), b"x" * 150)
    assert stored.bodies("me") == [b"y", b"x" * 150]
