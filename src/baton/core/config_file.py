"""Read the configuration tree from the text of a TOML file, and say everything that is wrong with it at once."""

from __future__ import annotations

from types import UnionType
from typing import Any, cast, get_args, get_origin

import msgspec
from msgspec import Struct

from baton.core.config import Config
from baton.core.errors import ConfigError
from baton.core.names import nearest


def load(text: str) -> Config:
    """Decode and check a TOML file's text. Raises ConfigError with every problem, one per line."""
    try:
        raw = msgspec.toml.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"not a TOML file: {error}") from error
    problems = _take_unknown_keys(raw, Config, "")
    config = _convert(raw, problems)
    problems += config.problems()
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _convert(raw: dict[str, Any], problems: list[str]) -> Config:
    """Build the tree from the values that fit it, and note in `problems` each that does not.

    msgspec stops at the first, so that one is taken out and the rest is tried again.
    """
    while True:
        try:
            return msgspec.convert(raw, Config)
        except msgspec.ValidationError as error:
            problems.append(f"not a valid configuration: {error}")
            _take_out(raw, str(error).rpartition("`$.")[2])


def _take_out(raw: dict[str, Any], place: str) -> None:
    """Remove what stands at a place such as `kv.blocks` or `hooks.request[0].use`: of a list, all of it."""
    *folders, last = place.partition("`")[0].partition("[")[0].split(".")
    for folder in folders:
        raw = raw[folder]
    del raw[last]


def _take_unknown_keys(raw: dict[str, Any], kind: type[Struct], path: str) -> list[str]:
    """Take out every key that the tree does not have. Returns them with the nearest ones that it has."""
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    found: list[str] = []
    for key, value in list(raw.items()):
        if key not in fields:
            close = nearest(key, fields)
            hint = f"did you mean {path}{close}?" if close else f"known here: {', '.join(fields)}"
            found.append(f"unknown key {path}{key}; {hint}")
            del raw[key]
            continue
        inner = _section(fields[key])
        if isinstance(value, dict) and inner is not None:
            found += _take_unknown_keys(cast("dict[str, Any]", value), inner, f"{path}{key}.")
    return found


def _section(kind: Any) -> type[Struct] | None:  # noqa: ANN401  types are values of any kind here
    """The section that a field holds, whether it always does or only where it is given."""
    held = [part for part in (kind, *get_args(kind)) if isinstance(part, type) and issubclass(part, Struct)]
    return held[0] if held and get_origin(kind) in (None, UnionType) else None
