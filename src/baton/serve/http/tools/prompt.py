"""Put tools, calls and their results into a conversation, in the form that its chat template expects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from baton.serve.http.tools.formats import MISTRAL, ToolFormat
from baton.serve.http.tools.parser import CALL_ID_CHARS, call_id
from baton.serve.http.wire.schemas import JsonSchema, Tool

Message = dict[str, Any]
_INSTRUCTIONS = (
    "You can call functions. Their signatures, one JSON object per line:\n{signatures}\n"
    "To call one, answer with nothing but its name and arguments, like this:\n"
    '<tool_call>\n{{"name": "the function", "arguments": {{"key": "value"}}}}\n</tool_call>\n'
    "Its result comes back between <tool_response> and </tool_response>."
)


def tool_dicts(tools: Sequence[Tool]) -> list[JsonSchema]:
    """Return tools in the form that chat templates expect."""
    return [msgspec.to_builtins(tool) for tool in tools]


def template_messages(messages: Sequence[Message], form: ToolFormat, tools: Sequence[Tool]) -> list[Message]:
    """Return messages with calls and results in the model's format. A template without tools gets them as text."""
    written = [_with_calls(message, form) for message in messages]
    return _described(written, tools) if form.in_prompt else written


def _with_calls(message: Message, form: ToolFormat) -> Message:
    """Return a message with the arguments of calls as objects, because templates encode them as JSON themselves."""
    if form is MISTRAL and "tool_call_id" in message:
        return {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    if not message.get("tool_calls"):
        return message
    calls: list[Message] = []
    for call in message["tool_calls"]:
        function = call["function"]
        made = {"id": call["id"], "type": "function", "function": {**function, "arguments": _object(function)}}
        calls.append({**made, "id": _short_id(call["id"])} if form is MISTRAL else made)
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _object(function: Message) -> object:
    """Return the arguments as an object, or unchanged if their text is not a JSON object."""
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except (ValueError, RecursionError):
        return function["arguments"]
    return arguments if isinstance(arguments, dict) else function["arguments"]


def _short_id(sent: str) -> str:
    """Return an id that Mistral's templates accept, of nine letters and digits. Other ids are hashed."""
    return sent if len(sent) == CALL_ID_CHARS and sent.isalnum() else call_id(sent)


def _described(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    written = [_in_words(message) for message in messages]
    if not tools:
        return written
    signatures = "\n".join(msgspec.json.encode(tool.function).decode() for tool in tools)
    instructions = _INSTRUCTIONS.format(signatures=signatures)
    if written and written[0]["role"] == "system":
        first = {**written[0], "content": f"{written[0]['content']}\n\n{instructions}"}
        return [first, *written[1:]]
    return [{"role": "system", "content": instructions}, *written]


def _in_words(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    called = [
        json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]}, ensure_ascii=False)
        for call in message["tool_calls"]
    ]
    marked = [f"<tool_call>\n{call}\n</tool_call>" for call in called]
    parts = [message["content"], *marked] if message["content"] else marked
    return {"role": message["role"], "content": "\n".join(parts)}
