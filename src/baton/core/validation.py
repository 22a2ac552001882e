"""Validation of configuration files: one walk that reports every problem at once, with the nearest known names.

Numeric ranges are declared at the fields of a struct:

class Link(Struct):
    bytes_per_s: Annotated[float, Range(above=0.0, such_as="bytes/s, such as 25e9")]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct, structs

Check = Callable[[str, object], list[str]]
"""An additional check of each scalar value. Gets the value and its path, such as `faults[0].at_s`; returns problems."""
SHOWN_CHARS_MAX = 60
NAME_CHARS_MAX = 200
"""Length of the longest mistyped name that is compared with known ones."""
_NAMES: dict[object, str] = {
    int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "nothing",
}  # fmt: skip


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is closest to a mistyped one. None: none is close."""
    if len(name) > NAME_CHARS_MAX:  # the search takes 0.3 us for each character
        return None
    found = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the hint of an error message, ` (did you mean 'top_p'?)`; empty if no known name is close."""
    best = nearest(name, known)
    return f" (did you mean {best!r}?)" if best else ""


class Range(Struct, frozen=True, kw_only=True):
    """The allowed values of a number. NaN and infinity are never allowed."""

    least: float = -math.inf
    above: float = -math.inf
    """Exclusive lower bound."""
    most: float = math.inf
    such_as: str = ""
    """An example with its unit, for the error message."""

    def takes(self, value: float) -> bool:
        return self.least <= value <= self.most and self.above < value <= sys.float_info.max

    def problem(self, path: str, value: float) -> str:
        """Return the error message for a value outside the range."""
        instead = f": write {self.such_as}" if self.such_as else ""
        return f"{path} is {_shown(value)}, but must be {self}{instead}"

    def __str__(self) -> str:
        """Describe the range, such as `above 0 and finite`."""
        if self.most < math.inf:
            return f"between {self.least:.12g} and {self.most:.12g}"
        if self.above > -math.inf:
            return f"above {self.above:g} and finite"
        return f"at least {self.least:g} and finite"


Count = Annotated[int, Range(least=1)]
Number = Annotated[int, Range(least=0)]
"""A count that may be 0."""
Seconds = Annotated[float, Range(least=0.0, such_as="seconds, such as 0.001")]
Price = Annotated[float, Range(least=0.0, such_as="seconds, such as 1e-5")]
"""Seconds per token, request or layer."""
Factor = Annotated[float, Range(above=0.0, such_as="a factor, such as 1.0")]
Ratio = Annotated[float, Range(least=0.0, most=1.0)]
Bandwidth = Annotated[float, Range(above=0.0, such_as="bytes/s, such as 25e9")]


def type_problems(value: object, kind: object, path: str = "", check: Check | None = None) -> list[str]:
    """Return every reason why decoded data cannot be converted to `kind`, in the order of the file.

    Reports unknown keys with the nearest known one, missing keys, and values of the wrong type. `kind`: a struct, or
    the type of a field. `path`: the position of the value, such as `workers[0].count`. `check`: called for each scalar.
    """
    struct = _struct(kind)
    if struct is not None:
        return _struct_problems(value, struct, path, check)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        given = [each for each in inner if each is not NoneType]
        if value is None and NoneType in inner:
            return []
        if len(given) == 1:
            return type_problems(value, given[0], path, check)
        alternatives = [struct for each in given if (struct := _struct(each)) is not None]
        if len(alternatives) == len(given) and all(each.__struct_config__.tag for each in alternatives):
            return _tagged_problems(value, alternatives, path, check)
        if len(alternatives) == 1 and isinstance(value, dict):
            return _struct_problems(cast("object", value), alternatives[0], path, check)
    if origin is dict and isinstance(value, dict):
        sections = cast("dict[str, object]", value).items()
        return [line for key, part in sections for line in type_problems(part, inner[1], _below(path, key), check)]
    if origin is tuple and inner[1:] == (Ellipsis,) and isinstance(value, list | tuple):
        members = enumerate(cast("Sequence[object]", value))
        return [line for index, part in members for line in type_problems(part, inner[0], f"{path}[{index}]", check)]
    return _scalar_problems(value, kind, path, check)


def valid_part(given: Mapping[str, Any], kind: type[Struct]) -> dict[str, Any]:
    """Return the keys of a section whose values have the right type, so that their ranges can be checked as well."""
    fields = {field.name: field.type for field in structs.fields(kind)}
    kept: dict[str, Any] = {}
    for key, value in given.items():
        inner = _struct(fields.get(key))
        if inner is not None and isinstance(value, dict):
            kept[key] = valid_part(cast("dict[str, Any]", value), inner)
        elif key in fields and not type_problems(value, fields[key]):
            kept[key] = value
    return kept


def out_of_range(value: Struct, path: str = "") -> list[str]:
    """Return an error for each number of a struct outside its declared range, nested sections included.

    `path`: the position of the section, such as `cost.wire`.
    """
    ranges = _ranges(type(value))
    fields = structs.asdict(value).items()
    return [line for key, part in fields for line in _range_problems(part, ranges[key], _below(path, key))]


def _struct(kind: object) -> type[Struct] | None:
    return kind if isinstance(kind, type) and issubclass(kind, Struct) else None


def _struct_problems(value: object, kind: type[Struct], path: str, check: Check | None) -> list[str]:
    if isinstance(value, kind):  # the planner builds sections that contain structs
        return []
    if not isinstance(value, dict):
        return [f"{path or 'the file'} must be a section: write [{path}] and its keys below"]
    given = cast("dict[str, object]", value)
    fields = {field.name: field for field in structs.fields(kind)}
    found: list[str] = []
    for key, part in given.items():
        if key in fields:
            found += type_problems(part, fields[key].type, _below(path, key), check)
        else:
            hint = _in_section(key, kind, path) or did_you_mean(key, fields) or f"; known keys: {', '.join(fields)}"
            found.append(f"unknown key {_below(path, key)}{hint}")
    missing = [name for name, field in fields.items() if field.required and name not in given]
    return found + [f"{_below(path, name)} is missing" for name in missing]


def _in_section(key: str, kind: type[Struct], path: str) -> str:
    """Return a hint if sections of a struct have this key: `port` is `http.port`. Empty: none has."""
    sections = {field.name: struct for field in structs.fields(kind) if (struct := _struct(field.type)) is not None}
    having = [_below(path, name) for name, struct in sections.items() if key in struct.__struct_fields__]
    return f": write {' or '.join(f'{section}.{key}' for section in having)}" if having else ""


def _tagged_problems(value: object, kinds: list[type[Struct]], path: str, check: Check | None) -> list[str]:
    """Check a section whose tag field names one of several structs."""
    known = {str(kind.__struct_config__.tag): kind for kind in kinds}
    field = kinds[0].__struct_config__.tag_field or "type"
    if not isinstance(value, dict):
        return [f"{path} must be a section with {field} = one of {', '.join(known)}"]
    given = dict(cast("dict[str, object]", value))
    tag = given.pop(field, None)
    if not isinstance(tag, str) or tag not in known:
        said = f"{_below(path, field)} is missing" if tag is None else f"{_below(path, field)} is {tag!r}"
        return [f"{said}{did_you_mean(str(tag), known)}: it must be one of {', '.join(known)}"]
    return _struct_problems(given, known[tag], path, check)


def _scalar_problems(value: object, kind: object, path: str, check: Check | None) -> list[str]:
    try:
        msgspec.convert(value, cast("type[object]", kind))
    except msgspec.ValidationError:
        text = repr(value)
        shown = text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}..."
        return [f"{path} is {shown}, but must be {_described(kind)}{_as_number(value)}"]
    return check(path, value) if check is not None else []


def _described(kind: object) -> str:
    """Describe a type for a user."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _described(inner[0])
    if origin is Literal:
        return f"one of {', '.join(repr(each) for each in inner)}"
    if origin is UnionType:
        return " or ".join(_described(each) for each in inner if each is not NoneType)
    if origin in (tuple, list):
        return "a list"
    return "a section" if origin is dict or _struct(kind) is not None else _NAMES.get(kind, "another value")


def _as_number(value: object) -> str:
    """Return a hint for a number that the file has as text: YAML reads `5e12` as text."""
    try:
        return f"; as a number it is {float(value):e}" if isinstance(value, str) else ""
    except ValueError:
        return ""


def _range_problems(part: object, bounds: Range | None, path: str) -> list[str]:
    match part:
        case Struct():
            return out_of_range(part, path)
        case tuple():
            members = enumerate(cast("tuple[object, ...]", part))
            return [line for index, member in members for line in _range_problems(member, bounds, f"{path}[{index}]")]
        case dict():
            sections = cast("Mapping[str, object]", part).items()
            return [line for key, section in sections for line in _range_problems(section, bounds, f"{path}.{key}")]
        case int() | float() if bounds is not None and not bounds.takes(part):
            return [bounds.problem(path, part)]
        case _:
            return []


@cache
def _ranges(kind: type[Struct]) -> Mapping[str, Range | None]:
    return {key: _range(hint) for key, hint in get_type_hints(kind, include_extras=True).items()}


def _range(hint: object) -> Range | None:
    """Return the range in a field's type, also inside of `Count | None` or `tuple[Price, ...]`."""
    if get_origin(hint) is Annotated:
        return next((each for each in get_args(hint)[1:] if isinstance(each, Range)), None)
    found = (_range(part) for part in get_args(hint))
    return next((bounds for bounds in found if bounds is not None), None)


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _shown(value: float) -> str:
    try:
        return f"{value:g}"
    except OverflowError:  # an integer that no float holds
        return "above 1e308" if value > 0 else "below -1e308"
