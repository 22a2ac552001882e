"""Bodies of Anthropic's Messages API, and the chat requests that they mean.

Source: Anthropic API reference, Messages, version 2023-06-01.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from baton.core.errors import RequestError
from baton.serve.http.wire.parsing import required
from baton.serve.http.wire.schemas import (
    CalledFunction,
    ChatMessage,
    ChatRequest,
    ChosenFunction,
    FunctionName,
    FunctionSpec,
    JsonSchema,
    MessageToolCall,
    NamedTool,
    StopString,
    StreamOptions,
    TextPart,
    Tool,
    ToolChoice,
)


class TextBlock(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    """No effect: prefixes are always cached."""
    citations: list[Any] | None = None
    """No effect."""


class MessageBlock(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a message. `type` decides which of the other fields it has."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    citations: list[Any] | None = None
    """No effect."""
    cache_control: dict[str, Any] | None = None
    """No effect: prefixes are always cached."""


class Turn(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[MessageBlock], Meta(min_length=1)]


class MessagesTool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: FunctionName
    input_schema: JsonSchema
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: dict[str, Any] | None = None
    """No effect: prefixes are always cached."""


class MessagesToolChoice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Required if `type` is `tool`."""
    disable_parallel_tool_use: bool | None = None


class MessagesMetadata(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    user_id: str | None = None


class CountTokensRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a message that are part of its prompt."""

    messages: Annotated[list[Turn], Meta(min_length=1)]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=128)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: dict[str, Any] | None = None
    """No effect: Baton does not steer reasoning."""


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    metadata: MessagesMetadata | None = None
    service_tier: str | None = None
    """No effect."""


class TokenCount(Struct, frozen=True):
    input_tokens: int


def prompt_fields(body: CountTokensRequest) -> ChatRequest:
    """Return the chat with the same prompt. Raises RequestError (400) for a block without its fields."""
    if body.messages[-1].role == "assistant":
        message = "the last message is the assistant's, and Baton does not continue an answer; end with the user's"
        raise RequestError(message, param="messages")
    system = body.system if isinstance(body.system, str | None) else "".join(block.text for block in body.system)
    messages = [ChatMessage(role="system", content=system)] if system else []
    for index, turn in enumerate(body.messages):
        messages += _chat_messages(turn, f"messages[{index}]")
    choice = body.tool_choice
    return ChatRequest(
        model=body.model,
        messages=messages,
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
    )


def chat_request(body: MessagesRequest) -> ChatRequest:
    """Return the chat request with the same meaning. Raises RequestError (400) for a block without its fields."""
    return structs.replace(
        prompt_fields(body),
        max_tokens=body.max_tokens,
        stream=body.stream,
        stream_options=StreamOptions(include_usage=True),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        user=body.metadata.user_id if body.metadata is not None else None,
    )


def _chat_messages(turn: Turn, path: str) -> list[ChatMessage]:
    """Return the messages of a turn: the results of tools are messages of their own, before the text."""
    if isinstance(turn.content, str):
        return [ChatMessage(role=turn.role, content=turn.content)]
    texts: list[TextPart] = []
    calls: list[MessageToolCall] = []
    results: list[ChatMessage] = []
    for index, block in enumerate(turn.content):
        place = f"{path}.content[{index}]"
        if (block.type == "tool_use" and turn.role == "user") or (block.type == "tool_result" and turn.role != "user"):
            raise RequestError(f"{place}: a message of the {turn.role} has no {block.type}", param=place)
        match block.type:
            case "text":
                texts.append(TextPart(type="text", text=required(block.text, f"{place}.text")))
            case "tool_use":
                calls.append(_call(block, place))
            case "tool_result":
                results.append(_result(block, place))
            case "thinking" | "redacted_thinking":
                pass  # of an earlier answer: chat templates leave it out, too
    content = texts or (None if calls else "")
    own = [] if results and not texts else [ChatMessage(role=turn.role, content=content, tool_calls=calls or None)]
    return [*results, *own]


def _call(block: MessageBlock, place: str) -> MessageToolCall:
    name = required(block.name, f"{place}.name")
    arguments = json.dumps(required(block.input, f"{place}.input"))
    return MessageToolCall(
        id=required(block.id, f"{place}.id"), function=CalledFunction(name=name, arguments=arguments)
    )


def _result(block: MessageBlock, place: str) -> ChatMessage:
    content = block.content or ""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return ChatMessage(
        role="tool",
        content=f"Error: {text}" if block.is_error else text,
        tool_call_id=required(block.tool_use_id, f"{place}.tool_use_id"),
    )


def _tool(tool: MessagesTool) -> Tool:
    function = FunctionSpec(name=tool.name, description=tool.description, parameters=tool.input_schema)
    return Tool(type="function", function=function)


def _choice(choice: MessagesToolChoice) -> ToolChoice:
    match choice.type:
        case "auto" | "none":
            return choice.type
        case "any":
            return "required"
        case "tool":
            name = required(choice.name, "tool_choice.name")
            return NamedTool(type="function", function=ChosenFunction(name=name))
