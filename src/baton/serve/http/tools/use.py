"""The tools of a chat request: the required calls, the grammar for them, and the parser of the output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from baton.compute.models.tokenizer import Tokenizer
from baton.compute.sandbox.messages import JSON_WHITESPACE
from baton.core.errors import RequestError
from baton.core.types import Grammar
from baton.serve.http.tools.formats import ToolFormat, format_of
from baton.serve.http.tools.parser import ToolParser
from baton.serve.http.wire.constraint import Constraint, check_depth, schema_constraint
from baton.serve.http.wire.schemas import ChatRequest, FunctionSpec, JsonSchema, NamedTool, Tool

CALLS_MAX = 16
"""Maximum calls in a response that must consist of calls, because small models repeat calls without end."""
_COMBINING = {"anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "unevaluatedProperties"}
"""Keywords beside which `properties` need not list all properties."""
_NO_ARGUMENTS: JsonSchema = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that the model may call or must call."""

    form: ToolFormat
    tools: Sequence[Tool]
    wanted: Sequence[FunctionSpec]
    """The model must call one of these. Empty: it may answer without a call."""
    many: bool
    """Whether a response may have several calls."""

    def constraint(self, tokenizer: Tokenizer) -> Constraint | None:
        """Return the constraint for a response that must be a call. None: the model may answer without a call."""
        if not self.wanted:
            return None
        parts = [
            schema_constraint(arguments_schema(tool.function), f"tools[{index}].function.parameters")
            for index, tool in enumerate(self.tools)
            if tool.function in self.wanted
        ]
        text = call_grammar(self.wanted, self.form, tokenizer, many=self.many)
        return Constraint(Grammar(kind="lark", text=text), "tools", tuple(parts))

    def parser(self, name: str) -> ToolParser:
        """Return a parser for one choice. `name`: seed of call ids, unique for each choice."""
        return ToolParser(self.form, name=name, calls_max=None if self.many else 1)

    def shown_tokens(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the special tokens that stay in the output text, because the parser needs them."""
        tokens = (mark_token(mark, tokenizer) for mark in (self.form.opening, self.form.closing) if mark)
        return frozenset(token for token in tokens if token is not None)


def tool_use(fields: ChatRequest, template: str) -> ToolUse | None:
    """Return the tools of a request. None: it has none, or forbids calls. Raises RequestError (400) if invalid."""
    tools, choice = fields.tools or [], fields.tool_choice
    if not tools:
        if choice in (None, "none", "auto"):
            return None
        raise RequestError("tool_choice asks for a call, but there are 0 tools; send tools", param="tool_choice")
    for index, tool in enumerate(tools):
        check_depth(tool.function.parameters, f"tools[{index}].function.parameters")
    if choice == "none":
        return None
    many = fields.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    return ToolUse(format_of(template), tools, _wanted(tools, choice), many)


def _wanted(tools: Sequence[Tool], choice: object) -> list[FunctionSpec]:
    functions = [tool.function for tool in tools]
    if isinstance(choice, NamedTool):
        name = choice.function.name
        found = [function for function in functions if function.name == name]
        if not found:
            known = ", ".join(function.name for function in functions)
            message = f"tool_choice names {name[:64]!r}, which is none of the tools; known: {known}"
            raise RequestError(message, param="tool_choice.function.name")
        return found[:1]
    return functions if choice == "required" else []


def call_grammar(functions: Sequence[FunctionSpec], form: ToolFormat, tokenizer: Tokenizer, *, many: bool) -> str:
    """Return a Lark grammar for one call of one of the functions, or with `many` for up to `CALLS_MAX` calls."""
    calls = " | ".join(f"%json {json.dumps(_call_schema(function, form))}" for function in functions)
    opening, closing = _mark(form.opening, tokenizer), _mark(form.closing, tokenizer)
    if form.is_list:
        more = f'("," " "? call){{0,{CALLS_MAX - 1}}}' if many else ""
        return f'start: {opening} " "? "[" call {more} "]"\ncall: {calls}\n'
    if form.is_bare:
        return f"start: call\ncall: {calls}\n"
    more = f'("\\n" call){{0,{CALLS_MAX - 1}}}' if many else ""
    return f'start: call {more}\ncall: {opening} "\\n" ({calls}) "\\n" {closing}\n'


def arguments_schema(function: FunctionSpec) -> JsonSchema:
    """Return the schema of a function's arguments, which are always an object.

    Its objects take only the properties that they name, unless they say otherwise: functions fail for invented ones.
    """
    parameters = function.parameters
    if parameters is None:
        return _NO_ARGUMENTS
    is_combined = '"allOf"' in json.dumps(parameters)  # each part names only some of the properties
    return {"type": "object", **(parameters if is_combined else _closed(parameters))}


def _closed(schema: JsonSchema) -> JsonSchema:
    """Add `additionalProperties: false` where a schema lists all of its properties."""
    closed = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(key), dict):
            closed[key] = {
                name: _closed(part) if isinstance(part, dict) else part for name, part in schema[key].items()
            }
    if isinstance(schema.get("items"), dict):
        closed["items"] = _closed(schema["items"])
    if "properties" in schema and not schema.keys() & _COMBINING:
        closed.setdefault("additionalProperties", False)
    return closed


def mark_token(mark: str, tokenizer: Tokenizer) -> int | None:
    """Return the special token of a mark. None: the vocabulary has no such token, so the mark is ordinary text."""
    tokens = tokenizer.encode(mark, add_special=False)
    return tokens[0] if len(tokens) == 1 and tokenizer.is_special(tokens[0]) else None


def _mark(mark: str, tokenizer: Tokenizer) -> str:
    token = mark_token(mark, tokenizer)
    return json.dumps(mark) if token is None else f"<[{token}]>"


def _call_schema(function: FunctionSpec, form: ToolFormat) -> JsonSchema:
    arguments = _rebased(arguments_schema(function), f"#/properties/{form.arguments}")
    return {
        "x-guidance": {"whitespace_pattern": JSON_WHITESPACE},
        "type": "object",
        "properties": {"name": {"const": function.name}, form.arguments: arguments},
        "required": ["name", form.arguments],
        "additionalProperties": False,
    }


def _rebased(schema: object, place: str) -> object:
    """Prefix the references inside a schema with `place`, the path of the schema inside another one."""
    match schema:
        case dict():
            return {
                key: place + value[1:]
                if key == "$ref" and isinstance(value, str) and value.startswith("#")
                else _rebased(value, place)
                for key, value in schema.items()
            }
        case list():
            return [_rebased(part, place) for part in schema]
        case _:
            return schema
