"""The parts of chat bodies that are about tools, as OpenAI has them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from baton.serve.http.wire.formats import JsonSchema

FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    name: FunctionName
    description: str | None = None
    parameters: JsonSchema | None = None
    """Schema of the arguments. None: the function takes none."""
    strict: bool | None = None
    """Changes no answer: arguments follow the schema wherever a call is required, and are free where it is not."""


class Tool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionSpec


class ChosenFunction(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str


class NamedTool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one tool that has to be called."""

    type: Literal["function"]
    function: ChosenFunction


class CalledFunction(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: str
    """A JSON object, as text."""


class MessageToolCall(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call in a message: of an answer, or of one that a client sends back."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Left over from a stream. Changes no answer."""


ToolList = Annotated[list[Tool], Meta(max_length=128)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool
