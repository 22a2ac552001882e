"""What is wrong with one row of a trace: every field that cannot be read, with its value and what would fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar, cast

import msgspec
from msgspec import Meta, Struct, structs

Row = TypeVar("Row")
Fields = Mapping[str, object]
"""One row: names and values, words where they come from a CSV file."""

TOKENS_MAX = 100_000_000
"""Of one prompt or answer: more than any model reads. What is above was never a length."""
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
"""Characters of a value that a message repeats."""


def read_row(fields: Fields, kind: type[Row]) -> Row:
    """Convert the fields of a row into a struct; those that it does not know are left out.

    Raises ValueError with everything that does not fit, in words.
    """
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
    """What a value would have to be. Empty where it fits."""
    try:
        msgspec.convert(value, cast("type[object]", kind), strict=False)
    except msgspec.ValidationError as error:
        said = str(error).partition(" - at ")[0]
        return next((words for known, words in _FITTING if kind == known), f"another: {said}")
    return ""


def _shown(value: object) -> str:
    """As it stands in the file, or its beginning: in CSV numbers are words."""
    words = value if isinstance(value, str) and value else msgspec.json.encode(value).decode()
    return words if len(words) <= _SHOWN_MAX else f"{words[:_SHOWN_MAX]}..."
