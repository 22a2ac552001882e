"""What a number in a file may be: said where its key is declared, checked by one walk over what was read.

class Wire(Struct):
    bytes_per_s: Annotated[float, Range(above=0.0, such_as="bytes/s, such as 25e9")]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from functools import cache
from typing import Annotated, cast, get_args, get_origin, get_type_hints

from msgspec import Struct, structs


class Range(Struct, frozen=True, kw_only=True):
    """Which numbers a key takes. Infinity and what is no number are never among them."""

    least: float = -math.inf
    above: float = -math.inf
    """More than that, not as much."""
    most: float = math.inf
    such_as: str = ""
    """What to write instead, with its unit."""

    def takes(self, value: float) -> bool:
        """Whether the value is one of them."""
        return self.least <= value <= self.most and self.above < value <= sys.float_info.max

    def problem(self, place: str, value: float) -> str:
        """Say that it is not, and what would be."""
        instead = f": write {self.such_as}" if self.such_as else ""
        return f"{place} is {_shown(value)}, but must be {self}{instead}"

    def __str__(self) -> str:
        """In words, such as `above 0 and finite`."""
        if self.most < math.inf:
            return f"from {self.least:g} to {self.most:g}"
        if self.above > -math.inf:
            return f"above {self.above:g} and finite"
        return f"at least {self.least:g} and finite"


Count = Annotated[int, Range(least=1)]
Number = Annotated[int, Range(least=0)]
"""A count that may be none."""
Seconds = Annotated[float, Range(least=0.0, such_as="seconds, such as 0.001")]
Price = Annotated[float, Range(least=0.0, such_as="seconds, such as 1e-5")]
"""Of a token, a request or a layer."""
Factor = Annotated[float, Range(above=0.0, such_as="a factor, such as 1.0")]
Ratio = Annotated[float, Range(least=0.0, most=1.0)]
Bandwidth = Annotated[float, Range(above=0.0, such_as="bytes/s, such as 25e9")]


def out_of_range(value: Struct, place: str = "") -> list[str]:
    """Say every number that its key does not take, in the order of the keys, sections below included. Empty: none is.

    `place`: where the section stands, such as `cost.wire`.
    """
    found: list[str] = []
    ranges = _ranges(type(value))
    for key, part in structs.asdict(value).items():
        found += _wrong(part, ranges[key], f"{place}.{key}" if place else key)
    return found


def _wrong(part: object, bounds: Range | None, place: str) -> list[str]:
    match part:
        case Struct():
            return out_of_range(part, place)
        case tuple():
            members = enumerate(cast("tuple[object, ...]", part))
            return [line for index, member in members for line in _wrong(member, bounds, f"{place}[{index}]")]
        case dict():
            sections = cast("Mapping[str, object]", part).items()
            return [line for key, section in sections for line in _wrong(section, bounds, f"{place}.{key}")]
        case int() | float() if bounds is not None and not bounds.takes(part):
            return [bounds.problem(place, part)]
        case _:
            return []


@cache
def _ranges(kind: type[Struct]) -> Mapping[str, Range | None]:
    """By key: what it takes. None: whatever has its type."""
    return {key: _range(hint) for key, hint in get_type_hints(kind, include_extras=True).items()}


def _range(hint: object) -> Range | None:
    """Find the range in a field's type, wherever in it: `Count | None`, `tuple[Price, ...]`."""
    if get_origin(hint) is Annotated:
        return next((each for each in get_args(hint)[1:] if isinstance(each, Range)), None)
    found = (_range(part) for part in get_args(hint))
    return next((bounds for bounds in found if bounds is not None), None)


def _shown(value: float) -> str:
    """A file may have a whole number that no float holds."""
    try:
        return f"{value:g}"
    except OverflowError:
        return "above 1e308" if value > 0 else "below -1e308"
