"""Everything in a file that does not fit: the decoder alone stops at the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import NoneType, UnionType
from typing import cast, get_args, get_origin

import msgspec
from msgspec import Struct

from baton.core.names import did_you_mean

Judge = Callable[[str, object], list[str]]
"""What is wrong with a value of the right type. Told where it stands, such as `faults[0].at_s`, and the value."""


def _takes_all(_place: str, _value: object) -> list[str]:
    return []


def misfits(value: object, kind: object, place: str = "", judge: Judge = _takes_all) -> list[str]:
    """Say of every part of a decoded file why it cannot be part of a `kind`, in the file's order. Empty: it fits.

    `kind`: a struct, or what stands behind a field of one. `place`: where the value stands, such as `workers[0].count`.
    Unknown keys of a struct are among them, with the nearest known one, and keys that it needs and that are missing.
    `judge` is asked about every value that is no part of a file with parts of its own, and has the type that it must.
    """
    struct = _struct(kind)
    if struct is not None:
        return _in_struct(value, struct, place, judge)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        given = [each for each in inner if each is not NoneType]
        if value is None and NoneType in inner:
            return []
        if len(given) == 1:
            return misfits(value, given[0], place, judge)
        tagged = [struct for each in given if (struct := _struct(each)) is not None and struct.__struct_config__.tag]
        if tagged and len(tagged) == len(given):
            return _in_tagged(value, tagged, place, judge)
    parts = _parts(value, kind, place)
    if parts is None:
        return _of_leaf(value, kind, place, judge)
    return [line for below, part, inner_kind in parts for line in misfits(part, inner_kind, below, judge)]


def _struct(kind: object) -> type[Struct] | None:
    return kind if isinstance(kind, type) and issubclass(kind, Struct) else None


def _parts(value: object, kind: object, place: str) -> list[tuple[str, object, object]] | None:
    """Where every part of a dictionary or list stands, the part, and what it must be. None: one of both is neither."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is dict and isinstance(value, dict):
        return [(_below(place, key), part, inner[1]) for key, part in cast("dict[str, object]", value).items()]
    if origin is tuple and inner[1:] == (Ellipsis,) and isinstance(value, list | tuple):
        return [(f"{place}[{index}]", part, inner[0]) for index, part in enumerate(cast("Sequence[object]", value))]
    return None


def _in_struct(value: object, kind: type[Struct], place: str, judge: Judge) -> list[str]:
    if not isinstance(value, dict):
        return [f"{place or 'the file'} must be a section: write [{place}] and its keys below"]
    given = cast("dict[str, object]", value)
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    found: list[str] = []
    for key, part in given.items():
        if key in fields:
            found += misfits(part, fields[key].type, _below(place, key), judge)
        else:
            found.append(f"unknown key {_below(place, key)}{did_you_mean(key, fields)}")
    missing = [name for name, field in fields.items() if field.required and name not in given]
    return found + [f"{_below(place, name)} is missing" for name in missing]


def _in_tagged(value: object, kinds: list[type[Struct]], place: str, judge: Judge) -> list[str]:
    """Of a struct that says itself which one of several it is."""
    known = {str(kind.__struct_config__.tag): kind for kind in kinds}
    field = kinds[0].__struct_config__.tag_field or "type"
    if not isinstance(value, dict):
        return [f"{place} must be a section with {field} = one of {', '.join(known)}"]
    given = dict(cast("dict[str, object]", value))
    tag = given.pop(field, None)
    if not isinstance(tag, str) or tag not in known:
        said = f"{_below(place, field)} is missing" if tag is None else f"{_below(place, field)} is {tag!r}"
        return [f"{said}{did_you_mean(str(tag), known)}: it must be one of {', '.join(known)}"]
    return _in_struct(given, known[tag], place, judge)


def _of_leaf(value: object, kind: object, place: str, judge: Judge) -> list[str]:
    try:
        msgspec.convert(value, cast("type[object]", kind))
    except msgspec.ValidationError as error:
        return [f"{place} does not fit: {str(error).partition(' - at ')[0]}{_as_number(value)}"]
    return judge(place, value)


def _as_number(value: object) -> str:
    """Write a number that a file has as text so that it is read as one: to YAML, `5e12` is a word."""
    try:
        return f"; as a number it is {float(value):e}" if isinstance(value, str) else ""
    except ValueError:
        return ""


def _below(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key
