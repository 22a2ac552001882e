"""Convert one row of a trace into a struct, or name every field that does not fit, with its value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar, cast

import msgspec
from msgspec import Meta, Struct, structs

Row = TypeVar("Row")
Fields = Mapping[str, object]
"""Column names and values of one row. All values of a CSV file are strings."""

TOKENS_MAX = 100_000_000
"""Longest accepted prompt or answer: more than any model reads."""
Count = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
Length = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
Time = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]

_FITTING: tuple[tuple[object, str], ...] = (
    (Count, f"a whole number from 0 to {TOKENS_MAX:,}"),
    (Length, f"a whole number from 1 to {TOKENS_MAX:,}"),
    (Time, "a number of 0 or more: times count from the start of the trace"),
    (int, "a whole number"),
    (str, "a word"),
    (int | str, "a whole number or a word"),
    (float, "a number"),
    (Positive, "a number above 0"),
    (tuple[int, ...], "a list of whole numbers"),
)
_SHOWN_MAX = 60
"""Characters of a value that an error message repeats."""


def read_row(fields: Fields, kind: type[Row]) -> Row:
    """Convert the fields of a row into a struct; ignore unknown fields. Raises ValueError with every problem."""
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError("; ".join(_problems(fields, kind)) or str(error)) from error


def _problems(fields: Fields, kind: type[Row]) -> list[str]:
    found: list[str] = []
    for field in structs.fields(cast("type[Struct]", kind)):
        name = field.encode_name
        if name in fields:
            needed = _needed(fields[name], field.type)
            found += [f"{name} is {_shown(fields[name])}, but must be {needed}"] if needed else []
        elif field.required:
            found.append(f"{name} is missing")
    return found


def _needed(value: object, kind: object) -> str:
    """Return a description of the values that the field accepts, or an empty string if this value fits."""
    try:
        msgspec.convert(value, cast("type[object]", kind), strict=False)
    except msgspec.ValidationError as error:
        reason = str(error).partition(" - at ")[0]
        return next((words for known, words in _FITTING if kind == known), f"another: {reason}")
    return ""


def _shown(value: object) -> str:
    """Return the value as the file has it, or its beginning."""
    words = value if isinstance(value, str) and value else msgspec.json.encode(value).decode()
    return words if len(words) <= _SHOWN_MAX else f"{words[:_SHOWN_MAX]}..."
