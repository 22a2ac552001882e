"""Everything in a file that does not fit: the decoder alone stops at the first."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import cast, get_args, get_origin

import msgspec
from msgspec import Struct

from baton.core.names import did_you_mean


def misfits(value: object, kind: object, place: str = "") -> list[str]:
    """Say of every part of a decoded file why it cannot be part of a `kind`, in the file's order. Empty: it fits.

    `kind`: a struct, or what stands behind a field of one. `place`: where the value stands, such as `workers[0].count`.
    Unknown keys of a struct are among them, with the nearest known one, and keys that it needs and that are missing.
    """
    struct = _struct(kind)
    if struct is not None:
        return _in_struct(value, struct, place)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        given = [each for each in inner if each is not NoneType]
        if value is None and NoneType in inner:
            return []
        if len(given) == 1:
            return misfits(value, given[0], place)
        tagged = [struct for each in given if (struct := _struct(each)) is not None and struct.__struct_config__.tag]
        if tagged and len(tagged) == len(given):
            return _in_tagged(value, tagged, place)
    return _in_many(value, kind, place) or _of_leaf(value, kind, place)


def _struct(kind: object) -> type[Struct] | None:
    return kind if isinstance(kind, type) and issubclass(kind, Struct) else None


def _in_many(value: object, kind: object, place: str) -> list[str]:
    """Of the parts of a dictionary or a list, where both the value and the kind are one."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is dict and isinstance(value, dict):
        named = cast("dict[str, object]", value)
        return [line for key, part in named.items() for line in misfits(part, inner[1], _below(place, key))]
    if origin is tuple and isinstance(value, list):
        parts = cast("list[object]", value)
        return [line for index, part in enumerate(parts) for line in misfits(part, inner[0], f"{place}[{index}]")]
    return []


def _in_struct(value: object, kind: type[Struct], place: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{place or 'the file'} must be a section: write [{place}] and its keys below"]
    given = cast("dict[str, object]", value)
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    found: list[str] = []
    for key, part in given.items():
        if key in fields:
            found += misfits(part, fields[key].type, _below(place, key))
        else:
            found.append(f"unknown key {_below(place, key)}{did_you_mean(key, fields)}")
    missing = [name for name, field in fields.items() if field.required and name not in given]
    return found + [f"{_below(place, name)} is missing" for name in missing]


def _in_tagged(value: object, kinds: list[type[Struct]], place: str) -> list[str]:
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
    return _in_struct(given, known[tag], place)


def _of_leaf(value: object, kind: object, place: str) -> list[str]:
    try:
        msgspec.convert(value, cast("type[object]", kind))
    except msgspec.ValidationError as error:
        return [f"{place} does not fit: {str(error).partition(' - at ')[0]}"]
    return []


def _below(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key
