"""The grammar of a text that is nothing but tool calls: for clients that require one."""

from __future__ import annotations

import json
from collections.abc import Sequence

from baton.compute.models.grammar import JSON_WHITESPACE
from baton.compute.models.tokenizer import Tokenizer
from baton.serve.http.tools.formats import ToolFormat
from baton.serve.http.wire.schemas import FunctionSpec, JsonSchema

CALLS_MAX = 16
"""Calls in one answer that has to be calls: a small model repeats itself, and never comes to the end."""
_NO_ARGUMENTS: JsonSchema = {"type": "object", "properties": {}, "additionalProperties": False}


def call_grammar(functions: Sequence[FunctionSpec], form: ToolFormat, tokenizer: Tokenizer, *, many: bool) -> str:
    """Write a Lark grammar: one call of one of the functions, or with `many` any number of them after it."""
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
    """Return the schema of a function's arguments, which are an object whatever else it says."""
    if function.parameters is None:
        return _NO_ARGUMENTS
    return {"type": "object", **function.parameters}


def mark_token(mark: str, tokenizer: Tokenizer) -> int | None:
    """Return the special token that a mark is in this vocabulary. None: it is text like any other."""
    tokens = tokenizer.encode(mark, add_special=False)
    return tokens[0] if len(tokens) == 1 and tokenizer.is_special(tokens[0]) else None


def _mark(mark: str, tokenizer: Tokenizer) -> str:
    token = mark_token(mark, tokenizer)
    return json.dumps(mark) if token is None else f"<[{token}]>"


def _call_schema(function: FunctionSpec, form: ToolFormat) -> JsonSchema:
    arguments = _moved(arguments_schema(function), f"#/properties/{form.arguments}")
    return {
        "x-guidance": {"whitespace_pattern": JSON_WHITESPACE},
        "type": "object",
        "properties": {"name": {"const": function.name}, form.arguments: arguments},
        "required": ["name", form.arguments],
        "additionalProperties": False,
    }


def _moved(schema: object, place: str) -> object:
    """Let the references inside of a schema point to where it now stands."""
    match schema:
        case dict():
            return {
                key: place + value[1:]
                if key == "$ref" and isinstance(value, str) and value.startswith("#")
                else _moved(value, place)
                for key, value in schema.items()
            }
        case list():
            return [_moved(part, place) for part in schema]
        case _:
            return schema
