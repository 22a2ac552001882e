"""The items of OpenAI's Responses API: parts of an output, and the input of a stored response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from baton.serve.http.wire.schemas import CalledFunction, ChatMessage, MessageToolCall

Item = dict[str, Any]


def text_part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def reasoning_part(text: str) -> Item:
    return {"type": "reasoning_text", "text": text}


def call_item(call_id: str, name: str, arguments: str, status: str) -> Item:
    fields = {"call_id": call_id, "name": name, "arguments": arguments, "status": status}
    return {"id": f"fc_{call_id}", "type": "function_call", **fields}


def message_item(item_id: str, status: str, content: list[Item]) -> Item:
    """Return a message of the model."""
    return {"id": f"msg_{item_id}", "type": "message", "status": status, "role": "assistant", "content": content}


def reasoning_item(item_id: str, status: str, content: list[Item]) -> Item:
    return {"id": f"rs_{item_id}", "type": "reasoning", "status": status, "summary": [], "content": content}


def answer_of(items: Sequence[Item]) -> ChatMessage:
    """Return the message of a chat that an output means. Its reasoning is left out, as chat templates do."""
    texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
    calls = [
        MessageToolCall(id=item["call_id"], function=CalledFunction(name=item["name"], arguments=item["arguments"]))
        for item in items
        if item["type"] == "function_call"
    ]
    text = "".join(texts)
    if not calls:
        return ChatMessage(role="assistant", content=text)
    return ChatMessage(role="assistant", content=text or None, tool_calls=calls)


def input_items(messages: Sequence[ChatMessage], response_id: str) -> Iterator[Item]:
    """Yield the items of a conversation, in order. Ids of its messages are made of the response's id."""
    for index, message in enumerate(messages):
        name = f"{response_id}_in{index}"
        content = message.content or ""
        texts = [content] if isinstance(content, str) else [part.text for part in content]
        if message.role == "tool":
            call = {"call_id": message.tool_call_id or "", "output": "".join(texts)}
            yield {"id": f"fco_{name}", "type": "function_call_output", "status": "completed", **call}
        elif message.role != "assistant":
            parts = [{"type": "input_text", "text": text} for text in texts]
            fields = {"status": "completed", "role": message.role, "content": parts}
            yield {"id": f"msg_{name}", "type": "message", **fields}
        elif content or not message.tool_calls:
            yield message_item(name, "completed", [text_part(text) for text in texts])
        for call in message.tool_calls or ():
            yield call_item(call.id, call.function.name, call.function.arguments, "completed")
