"""Parse a body: bytes to JSON, JSON to a struct. Errors name the field, its accepted values and the received one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from baton.core.errors import RequestError
from baton.core.validation import did_you_mean
from baton.serve.http.wire.describe import describe, show, type_at, type_of
from baton.serve.http.wire.schemas import UNSUPPORTED

Body = TypeVar("Body", bound=msgspec.Struct)
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*?)(?:\[\.\.\.\])?`$")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_NAMED = re.compile(r"field `(?P<name>[^`]*)`")
_MISSING = object()


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Raises RequestError (400)."""
    try:
        body = msgspec.json.decode(raw)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason} at byte {error.start} of a text") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {str(error).split(' - at ')[0]}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {show(body)}")
    return body


def convert(body: Mapping[str, Any], into: type[Body]) -> Body:
    """Return the struct of a body. Raises RequestError (400)."""
    for name in body:
        if name not in _fields(into):
            raise _unknown_field(name, into)
    try:
        return _lenient(body, into)
    except msgspec.ValidationError as error:
        raise _value_error(str(error), body, into) from error


def _lenient(body: Mapping[str, Any], into: type[Body]) -> Body:
    """Convert a body, accepting 80.0 for 80: JSON has only one kind of number."""
    try:
        return msgspec.convert(body, into)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
        return msgspec.convert(_with_whole_numbers(body), into)


def _with_whole_numbers(value: object) -> object:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_with_whole_numbers(part) for part in value]
        case dict():
            return {name: _with_whole_numbers(part) for name, part in value.items()}
        case _:
            return value


@cache
def _info(struct: type[msgspec.Struct]) -> inspect.StructType:
    return type_of(struct)


@cache
def _fields(struct: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in _info(struct).fields)


def _unknown_field(name: str, struct: type[msgspec.Struct]) -> RequestError:
    if name in UNSUPPORTED:
        return RequestError(f"{name} is not supported: {UNSUPPORTED[name]}", param=name, code="unsupported_parameter")
    hint = did_you_mean(name, sorted(_fields(struct)))
    return RequestError(f"unknown field {show(name)}{hint}", param=name, code="unknown_parameter")


def _value_error(problem: str, body: Mapping[str, Any], struct: type[msgspec.Struct]) -> RequestError:
    """Return an error with the accepted and the received value, made from msgspec's message."""
    found = _PATH.search(problem)
    path = found["path"] if found else ""
    what = problem[: found.start()] if found else problem
    if named := _NAMED.search(what):
        return _field_name_error(what, named["name"], path)
    steps = [index or name for index, name in _STEP.findall(path)]
    got = _look_up(body, steps)
    shown = "" if got is _MISSING else f", got {show(got)}"
    if unsupported := next((UNSUPPORTED[step] for step in steps if step in UNSUPPORTED), None):
        return RequestError(f"{path} is not supported{shown}: {unsupported}", param=path, code="unsupported_parameter")
    accepted = type_at(_info(struct), steps)
    wanted = f"must be {describe(accepted)}" if accepted else f"is wrong: {what}"
    return RequestError(f"{path} {wanted}{shown}", param=path)


def _field_name_error(what: str, name: str, path: str) -> RequestError:
    """Return the error for a missing field, or for an unknown field of an inner object."""
    param = f"{path}.{name}" if path else name
    if "missing" in what:
        return RequestError(f"{param} is required", param=param, code="missing_required_parameter")
    if name in UNSUPPORTED:
        return RequestError(f"{param} is not supported: {UNSUPPORTED[name]}", param=param, code="unsupported_parameter")
    return RequestError(f"unknown field {param}", param=param, code="unknown_parameter")


def _look_up(body: object, steps: list[str]) -> object:
    for step in steps:
        match body:
            case dict() if step in body:
                body = body[step]
            case list() if step.isdigit():
                body = body[int(step)]
            case _:
                return _MISSING
    return body
