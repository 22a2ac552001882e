"""Describe the values that a field accepts, for error messages, from the type that validates it."""

from __future__ import annotations

import msgspec
from msgspec import inspect

SHOWN_CHARACTERS_MAX = 60


def type_of(struct: type[msgspec.Struct]) -> inspect.StructType:
    """Return a struct's fields and their types."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType), f"{struct} is not a struct"
    return info


def describe(kind: inspect.Type) -> str:
    """Return a description of the accepted values, such as `an integer from 1 to 128`."""
    match kind:
        case inspect.ListType(max_length=0):
            return "an empty list"
        case inspect.ListType():
            return "a list" + _lengths(kind, "items") + f", each {describe(kind.item_type)}"
        case inspect.DictType():
            return f"an object whose keys are {describe(kind.key_type)}, its values {describe(kind.value_type)}"
        case inspect.UnionType():
            return " or ".join(describe(part) for part in kind.types if not isinstance(part, inspect.NoneType))
        case inspect.StructType():
            return "an object with " + ", ".join(field.encode_name for field in kind.fields)
        case inspect.Metadata(extra={"words": str(words)}):
            return words
        case inspect.Metadata():
            return describe(kind.type)
    return _describe_scalar(kind)


def _describe_scalar(kind: inspect.Type) -> str:
    match kind:
        case inspect.IntType():
            return "an integer" + _between(kind)
        case inspect.FloatType():
            return "a number" + _between(kind)
        case inspect.StrType(max_length=0):
            return "empty text"
        case inspect.StrType():
            return "text" + _lengths(kind, "characters") + (f" matching {kind.pattern}" if kind.pattern else "")
        case inspect.BoolType():
            return "true or false"
        case inspect.NoneType():
            return "null"
        case inspect.LiteralType():
            return " or ".join(show(value) for value in kind.values)
    return "any value"


def show(value: object) -> str:
    """Return a received value as JSON, cut to a readable length."""
    return cut(msgspec.json.encode(value).decode())


def cut(text: str) -> str:
    """Return a text of a client, cut to a readable length."""
    return text if len(text) <= SHOWN_CHARACTERS_MAX else f"{text[:SHOWN_CHARACTERS_MAX]}... ({len(text)} characters)"


def _between(kind: inspect.IntType | inspect.FloatType) -> str:
    low = f"{kind.ge:g}" if isinstance(kind.ge, float) else kind.ge
    high = f"{kind.le:g}" if isinstance(kind.le, float) else kind.le
    match kind.gt, low, high:
        case None, None, None:
            return ""
        case None, _, None:
            return f" of at least {low}"
        case None, _, _:
            return f" from {low} to {high}"
        case _:
            return f" above {kind.gt:g} and at most {high}"


def _lengths(kind: inspect.StrType | inspect.ListType, unit: str) -> str:
    match kind.min_length, kind.max_length:
        case None, None:
            return ""
        case low, None:
            return f" of at least {low} {unit}"
        case None, high:
            return f" of at most {high} {unit}"
        case low, high:
            return f" of {low} to {high} {unit}"
