"""Bodies of OpenAI's Responses API, and the chat requests that they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

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
    NamedSchema,
    NamedTool,
    ResponseFormat,
    StreamOptions,
    TextPart,
    Tool,
    ToolChoice,
)


class ContentPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    """No effect."""
    logprobs: list[Any] | None = None
    """No effect."""


class InputItem(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the conversation. `type` decides which of the other fields it has."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None

    # clients send these fields of responses back
    id: str | None = None
    status: str | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None


class FunctionTool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class ChosenTool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


class TextFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")] | None = None
    schema: JsonSchema | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Annotated[str, Meta(max_length=64)] | None = None
    """As `verbosity` of a chat."""


class ReasoningOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    effort: Annotated[str, Meta(max_length=64)] | None = None
    """As `reasoning_effort` of a chat."""
    summary: str | None = None
    """No effect: the reasoning itself is an item of the output."""
    generate_summary: str | None = None
    """No effect."""


class ResponsesRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input: str | Annotated[list[InputItem], Meta(min_length=1)] | None = None
    """Optional only with `previous_response_id`."""
    model: str | None = None
    instructions: str | None = None
    """Not carried over to the next response, as in OpenAI's API."""
    previous_response_id: str | None = None
    store: bool | None = None
    """False: no later response can continue this one."""
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    user: str | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    reasoning: ReasoningOptions | None = None

    # no effect
    metadata: dict[str, Any] | None = None
    include: list[str] | None = None
    stream_options: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


def chat_messages(body: ResponsesRequest) -> list[ChatMessage]:
    """Return the messages of the input. Raises RequestError (400) for an item without its fields."""
    if body.input is None and body.previous_response_id is not None:
        return []
    given = required(body.input, "input")
    if isinstance(given, str):
        return [ChatMessage(role="user", content=given)]
    messages: list[ChatMessage] = []
    calls: list[MessageToolCall] = []
    for index, item in enumerate(given):
        place = f"input[{index}]"
        if item.type == "function_call":
            calls.append(_call(item, place))
            continue
        if calls:  # calls in a row are one message of a chat
            messages.append(called_message(calls))
            calls = []
        match item.type:
            case "message":
                role = required(item.role, f"{place}.role")
                messages.append(ChatMessage(role=role, content=_content(item.content, f"{place}.content")))
            case "function_call_output":
                messages.append(
                    ChatMessage(
                        role="tool",
                        content=_content(item.output, f"{place}.output"),
                        tool_call_id=required(item.call_id, f"{place}.call_id"),
                    )
                )
            case "reasoning":
                pass  # of an earlier answer: chat templates leave it out, too
    return [*messages, called_message(calls)] if calls else messages


def called_message(calls: Sequence[MessageToolCall], text: str | None = None) -> ChatMessage:
    """Return a message of the assistant with tool calls."""
    return ChatMessage(role="assistant", content=text, tool_calls=list(calls))


def chat_request(body: ResponsesRequest, history: Sequence[ChatMessage]) -> ChatRequest:
    """Return the chat request that goes on after `history`, which includes the input."""
    instructions = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    return ChatRequest(
        model=body.model,
        messages=[*instructions, *history],
        max_tokens=body.max_output_tokens,
        stream=body.stream,
        stream_options=StreamOptions(include_usage=True),
        temperature=body.temperature,
        top_p=body.top_p,
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body.text.format) if body.text is not None and body.text.format is not None else None,
        user=body.user,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        verbosity=body.text.verbosity if body.text is not None else None,
    )


def _content(content: str | list[ContentPart] | None, path: str) -> str | list[TextPart]:
    found = required(content, path)
    if isinstance(found, str):
        return found
    texts = [part.text if part.refusal is None else part.refusal for part in found]
    return [
        TextPart(type="text", text=required(text, f"{path}[{index}].text")) for index, text in enumerate(texts)
    ] or ""


def _call(item: InputItem, place: str) -> MessageToolCall:
    function = CalledFunction(
        name=required(item.name, f"{place}.name"), arguments=required(item.arguments, f"{place}.arguments")
    )
    return MessageToolCall(id=required(item.call_id, f"{place}.call_id"), function=function)


def _tool(tool: FunctionTool) -> Tool:
    function = FunctionSpec(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _choice(choice: Literal["none", "auto", "required"] | ChosenTool | None) -> ToolChoice | None:
    if isinstance(choice, ChosenTool):
        return NamedTool(type="function", function=ChosenFunction(name=choice.name))
    return choice


def _format(asked: TextFormat) -> ResponseFormat:
    if asked.type != "json_schema":
        return ResponseFormat(type=asked.type)
    schema = required(asked.schema, "text.format.schema")
    return ResponseFormat(type="json_schema", json_schema=NamedSchema(name=asked.name or "answer", schema=schema))
