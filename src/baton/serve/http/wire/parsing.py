"""Parse a body: bytes to JSON, JSON to a struct. Errors name the field, its accepted values and the received one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import inspect

from baton.core.errors import RequestError
from baton.core.validation import did_you_mean
from baton.serve.http.wire.describe import cut, describe, show, type_of
from baton.serve.http.wire.schemas import UNSUPPORTED, ChatRequest, TokenizeRequest

Body = TypeVar("Body", bound=msgspec.Struct)
Value = TypeVar("Value")
WALKED_MAX = 10_000
"""Maximum parts of an invalid field that are searched for the first wrong one, as this blocks the event loop."""

LEVELS_MAX = 256
"""Maximum nesting of a body, because the functions that walk a body recurse."""
UNKNOWN_FIELDS_MAX = 1000
"""Maximum unknown fields of a body that are ignored."""
BRACKETS_MAX = 200_000
"""Maximum `[` and `{` in a body: lists and objects take the most time and memory."""
_PLAIN = frozenset({int, float, str, bool, type(None)})


class UnknownFieldError(RequestError):
    """A body has a field that Baton does not know."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """The first part of a body that its type does not accept."""

    steps: tuple[str | int, ...]
    """Field names and list indexes from the body to the part."""
    problem: Literal["value", "missing", "unknown"]
    accepted: inspect.Type | None = None
    value: object = None

    @property
    def path(self) -> str:
        """Path of the part as clients write it, such as `messages[0].content`."""
        return "".join(f"[{step}]" if isinstance(step, int) else f".{cut(step)}" for step in self.steps).lstrip(".")


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raises RequestError (400) if it is not one, or has too many parts or levels."""
    brackets = raw.count(b"[") + raw.count(b"{")
    if brackets > BRACKETS_MAX:
        raise RequestError(
            f"the body has {brackets} brackets, at most {BRACKETS_MAX} are allowed; send several requests"
        )
    try:
        body = msgspec.json.decode(raw)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason} at byte {error.start} of a text") from error
    except RecursionError as error:
        raise _too_deep() from error
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {str(error).split(' - at ')[0]}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {show(body)}")
    if brackets > LEVELS_MAX and is_deeper(body, LEVELS_MAX):
        raise _too_deep()
    return body


def is_deeper(value: object, levels_max: int) -> bool:
    """Return whether a JSON value is nested more than `levels_max` levels deep."""
    level = [value]
    for _ in range(levels_max):
        level = [child for part in level for child in _containers(part)]
        if not level:
            return False
    return True


def _containers(value: object) -> list[object]:
    """Return the lists and objects directly inside a JSON value."""
    parts: Iterable[object] = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [] if _PLAIN.issuperset(map(type, parts)) else [part for part in parts if isinstance(part, dict | list)]


def _too_deep() -> RequestError:
    return RequestError(f"the body is nested too deeply: at most {LEVELS_MAX} levels are allowed; nest it less")


def required(value: Value | None, path: str) -> Value:
    """Return the value of a field. Raises RequestError (400), which names the field, if there is none."""
    if value is None:
        raise RequestError(f"{path} is required", param=path, code="missing_required_parameter")
    return value


def convert(body: Mapping[str, Any], into: type[Body]) -> Body:
    """Convert a body to a struct. Raises RequestError (400), which names the field, if it does not fit."""
    for name in body:
        if name not in _types(into):
            raise _unknown_field(name, into)
    try:
        made = msgspec.convert(body, into)
    except msgspec.ValidationError:
        whole = {name: _with_whole_numbers(value) for name, value in body.items()}
        try:
            made = msgspec.convert(whole, into)
        except msgspec.ValidationError as error:
            raise _misfit_error(_first_misfit(body, whole, into)) from error
    _check_messages(made)
    return made


def without_unknown_fields(body: Mapping[str, Any], into: type[msgspec.Struct]) -> tuple[dict[str, Any], list[str]]:
    """Return a body without the fields that a struct does not have, and their paths.

    Fields of other servers that would change the response are kept, so that `convert` rejects them.
    """
    ignored: list[str] = []
    return _known_part(body, _info(into), "", ignored), ignored


def _known_part(value: Any, kind: inspect.Type, path: str, ignored: list[str]) -> Any:  # noqa: ANN401
    match kind:
        case inspect.Metadata():
            return _known_part(value, kind.type, path, ignored)
        case inspect.UnionType():
            member = next((part for part in kind.types if _has_json_type(value, part)), None)
            return value if member is None else _known_part(value, member, path, ignored)
        case inspect.StructType() if isinstance(value, Mapping):
            fields, prefix = _types(kind.cls), f"{path}." if path else ""
            ignored += [prefix + name for name in value if name not in fields and name not in UNSUPPORTED]
            if len(ignored) > UNKNOWN_FIELDS_MAX:
                raise RequestError(f"the body has more than {UNKNOWN_FIELDS_MAX} unknown fields; leave them out")
            return {
                name: _known_part(part, fields[name], prefix + name, ignored) if name in fields else part
                for name, part in value.items()
                if name in fields or name in UNSUPPORTED
            }
        case inspect.ListType() if isinstance(value, list) and _has_struct(kind.item_type):
            return [_known_part(part, kind.item_type, f"{path}[{i}]", ignored) for i, part in enumerate(value)]
        case _:
            return value


def _has_struct(kind: inspect.Type) -> bool:
    match kind:
        case inspect.Metadata():
            return _has_struct(kind.type)
        case inspect.UnionType():
            return any(_has_struct(part) for part in kind.types)
        case _:
            return isinstance(kind, inspect.StructType | inspect.ListType)


def _first_misfit(body: Mapping[str, Any], whole: Mapping[str, Any], into: type[msgspec.Struct]) -> Misfit:
    """Return the first wrong part of a body. msgspec finds the wrong field, which is fast; only that one is walked."""
    fields, hints = {field.encode_name: field for field in _info(into).fields}, _hints(into)
    for name, value in body.items():
        field = fields[name]
        try:
            msgspec.convert(whole[name], hints[field.name])
        except msgspec.ValidationError:
            return find_misfit(value, field.type, (name,)) or Misfit((name,), "value", field.type, value)
    missing = next(name for name, field in fields.items() if field.required and name not in body)
    return Misfit((missing,), "missing")


def _check_messages(body: msgspec.Struct) -> None:
    """Raise RequestError for a message without content, unless it is the assistant's and has tool calls."""
    messages = body.messages or [] if isinstance(body, ChatRequest | TokenizeRequest) else []
    for index, message in enumerate(messages):
        if message.content is None and not (message.role == "assistant" and message.tool_calls):
            raise _misfit_error(Misfit(("messages", index, "content"), "missing"))


def _with_whole_numbers(value: object) -> object:
    """Return the value with integers for whole floats: JSON allows 80.0 for 80, but msgspec rejects it."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list() if float in (kinds := {*map(type, value)}) or not _PLAIN.issuperset(kinds):
            return [_with_whole_numbers(part) for part in value]
        case dict():
            return {name: _with_whole_numbers(part) for name, part in value.items()}
        case _:
            return value


def find_misfit(
    value: object, kind: inspect.Type, steps: tuple[str | int, ...] = (), left: Iterator[int] | None = None
) -> Misfit | None:
    """Return the first part of a decoded JSON value that a type does not accept. None: it accepts all parts.

    At most `WALKED_MAX` parts are checked: `left` yields once for each part that may still be checked.
    """
    left = iter(range(WALKED_MAX)) if left is None else left
    match kind:
        case inspect.Metadata():
            found = find_misfit(value, kind.type, steps, left)
        case inspect.UnionType():
            member = next((part for part in kind.types if _has_json_type(value, part)), None)
            found = Misfit(steps, "value", kind, value) if member is None else find_misfit(value, member, steps, left)
        case inspect.StructType() if isinstance(value, dict):
            return _struct_misfit(value, kind, steps, left)
        case inspect.ListType() if isinstance(value, list) and _fits_length(value, kind):
            walked = zip(range(len(value)), value, left)  # noqa: B905  `left` may be shorter
            parts = (find_misfit(part, kind.item_type, (*steps, index), left) for index, part, _ in walked)
            return next((part for part in parts if part is not None), None)
        case _:
            found = None if _accepts(kind, value) else Misfit(steps, "value", kind, value)
    if found is not None and found.steps == steps and found.problem == "value":
        return replace(found, accepted=kind)  # the error describes the whole type of the field
    return found


def _struct_misfit(
    value: dict[str, Any], kind: inspect.StructType, steps: tuple[str | int, ...], left: Iterator[int]
) -> Misfit | None:
    types = _types(kind.cls)
    for name, part in value.items():
        if name not in types:
            return Misfit((*steps, name), "unknown")
        found = find_misfit(part, types[name], (*steps, name), left)
        if found is not None:
            return found
    missing = [field.encode_name for field in kind.fields if field.required and field.encode_name not in value]
    return Misfit((*steps, missing[0]), "missing") if missing else None


def _has_json_type(value: object, kind: inspect.Type) -> bool:
    match kind:
        case inspect.Metadata():
            return _has_json_type(value, kind.type)
        case inspect.StructType() | inspect.DictType():
            return isinstance(value, dict)
        case inspect.ListType():
            return isinstance(value, list)
        case inspect.StrType() | inspect.LiteralType():
            return isinstance(value, str)
        case inspect.BoolType():
            return isinstance(value, bool)
        case inspect.IntType() | inspect.FloatType():
            return isinstance(value, int | float) and not isinstance(value, bool)
        case inspect.NoneType():
            return value is None
    return True


def _accepts(kind: inspect.Type, value: object) -> bool:
    """Return whether a type without structs inside accepts a value."""
    if not _has_json_type(value, kind):
        return False
    match kind, value:
        case inspect.DictType(), dict():
            if not _fits_length(value, kind):
                return False
            items = islice(value.items(), WALKED_MAX)
            wrong = (find_misfit(key, kind.key_type) or find_misfit(part, kind.value_type) for key, part in items)
            return all(misfit is None for misfit in wrong)
        case inspect.StrType(), str():
            return _fits_length(value, kind) and (kind.pattern is None or re.search(kind.pattern, value) is not None)
        case inspect.IntType(), int() | float():
            return (isinstance(value, int) or value.is_integer()) and _fits_range(value, kind)
        case inspect.FloatType(), int() | float():
            return _fits_range(value, kind)
        case inspect.LiteralType(), _:
            return value in kind.values
        case inspect.ListType(), _:
            return False  # its length does not fit
    return True


def _fits_length(value: str | list[Any] | dict[str, Any], kind: inspect.StrType | inspect.ListType) -> bool:
    low, high = kind.min_length or 0, kind.max_length
    return low <= len(value) and (high is None or len(value) <= high)


def _fits_range(value: float, kind: inspect.IntType | inspect.FloatType) -> bool:
    return (
        (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
        and (kind.lt is None or value < kind.lt)
    )


@cache
def _info(struct: type[msgspec.Struct]) -> inspect.StructType:
    return type_of(struct)


@cache
def _types(struct: type[msgspec.Struct]) -> dict[str, inspect.Type]:
    """Return the types of a struct's fields, by their names in JSON."""
    return {field.encode_name: field.type for field in _info(struct).fields}


@cache
def _hints(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(struct, include_extras=True)


def _unknown_field(name: str, struct: type[msgspec.Struct]) -> RequestError:
    if name in UNSUPPORTED:
        return RequestError(f"{name} is not supported: {UNSUPPORTED[name]}", param=name, code="unsupported_parameter")
    hint = did_you_mean(name, sorted(_types(struct)))
    return UnknownFieldError(f"unknown field {show(name)}{hint}", param=cut(name), code="unknown_parameter")


def _misfit_error(misfit: Misfit) -> RequestError:
    path, name = misfit.path, misfit.steps[-1]
    if misfit.problem == "missing":
        return RequestError(f"{path} is required", param=path, code="missing_required_parameter")
    if misfit.problem == "unknown":
        if name in UNSUPPORTED:
            message = f"{path} is not supported: {UNSUPPORTED[name]}"
            return RequestError(message, param=path, code="unsupported_parameter")
        return UnknownFieldError(f"unknown field {path}", param=path, code="unknown_parameter")
    got = f", got {show(misfit.value)}"
    if unsupported := next((UNSUPPORTED[step] for step in misfit.steps if step in UNSUPPORTED), None):
        return RequestError(f"{path} is not supported{got}: {unsupported}", param=path, code="unsupported_parameter")
    assert misfit.accepted is not None, f"{path} is a misfit without the type that it misses"
    return RequestError(f"{path} must be {describe(misfit.accepted)}{got}", param=path)
